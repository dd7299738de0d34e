"""A rank holds as much memory as was predicted, within 5 %, for models of every kind.

Measured on Gloo ranks, operator by operator: every memory that an operator returned and something still refers to.
What operators allocate for themselves is in neither number; `benchmarks/memory_truth.py` looks at that as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import models
import tutti
from cases import crossed
from liveness import most_of_step
from tutti.analysis.memory import CPU, memory
from tutti.analysis.replay import replay

PLANS = ("dp", "zero3", "dp2xtp2")
EVERY = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "deepseek", "mixture", "unet2d", "lstm")
WITHIN = 0.05


def predicted_and_measured(name: str, plan: str) -> tuple[int, int]:
    """Bytes of this rank at the peak of a step. Runs in each Gloo process."""
    model, batch, loss = models.case(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tutti.parallelize(model, optimizer, batch, loss=loss, cluster="cpu:4", plan=plan, level="O0")
    expected = memory(replay(step.program), replace(CPU, inside=False)).peak
    step(batch)
    return expected, most_of_step(step, batch)


def check(pool, name: str, plan: str) -> None:
    for rank, (expected, measured) in enumerate(pool.run(predicted_and_measured, name, plan)):
        assert expected == pytest.approx(measured, rel=WITHIN), f"rank {rank}: {expected / measured:.3f} of the truth"


@pytest.mark.parametrize("name, plan", crossed(["llama", "lstm"], PLANS))
def test_memory_of_a_rank(pool, name, plan):
    check(pool, name, plan)


@pytest.mark.slow
def test_memory_of_a_rank_that_computes_layers_again(pool):
    check(pool, "llama", "zero3xrecompute")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("llama", "lstm")])
def test_memory_of_a_rank_of_every_model(pool, name, plan):
    check(pool, name, plan)
