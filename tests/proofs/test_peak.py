"""No model needs more memory than eager PyTorch takes; updates in place save a copy of parameters and state, and those
that go along with the backward pass most of the gradients.

Counted is every memory that an operator returned and something still refers to. On one device, operator by operator,
against the same model's `loss.backward()` and PyTorch's fused AdamW.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import models
import tutti
from cases import some
from liveness import most_alive, most_of_step
from tutti.analysis.passes import LEVELS
from tutti.lower.memory import inplace
from tutti.lower.memory.inplace import update_in_place
from tutti.lower.overlap import bucket

FEW = 2048  # bytes: of numbers like counts of steps, and of statistics of a norm


def eager(name: str) -> int:
    """Bytes at the peak of an eager step."""
    model, batch, loss = models.case(name)
    loss = loss or (lambda model, batch: getattr(output := model(**batch), "loss", output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(*tensors):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    gc.collect()
    state = [x for slots in optimizer.state.values() for x in slots.values()]
    return most_alive(step, [*model.parameters(), *model.buffers(), *state], batch)[1]


def ours(name: str, optimizer=torch.optim.AdamW, plan: str = "dp", cluster: str = "cpu:1", **how) -> int:
    """Bytes at the peak of a step of the same model, of all ranks that are run in this process."""
    model, batch, loss = models.case(name)
    step = tutti.parallelize(
        model, optimizer(model.parameters(), lr=1e-3), batch, loss=loss, cluster=cluster, plan=plan, level="O0", **how
    )
    step(batch)
    return most_of_step(step, batch)


QUICK = ("llama", "bert", "clip", "mixtral", "edsr", "resnet")


@pytest.mark.parametrize("name", some(models.MODELS, QUICK))
def test_no_more_than_eager(name):
    assert ours(name) <= eager(name) + FEW


@pytest.mark.parametrize(
    ("optimizer", "plan", "cluster", "copies"),
    [
        (torch.optim.AdamW, "dp", "cpu:1", 1.8),
        (torch.optim.AdamW, "zero1", "cpu:2", 1.0),
        (partial(torch.optim.SGD, momentum=0.9), "dp", "cpu:1", 0.7),
    ],
)
def test_updates_in_place_save_copies(optimizer, plan, cluster, copies, monkeypatch):
    """The model is larger than its activations, so copies of its parameters count.

    Without updates in place, gradients are still freed early.
    """
    parameters = sum(p.nbytes for p in models.case("dlrm")[0].parameters())
    in_place = ours("dlrm", optimizer, plan, cluster)
    without = tuple(p for p in LEVELS["O0"].before if p is not update_in_place)
    monkeypatch.setitem(LEVELS, "O0", replace(LEVELS["O0"], before=without, after=()))
    assert ours("dlrm", optimizer, plan, cluster) - in_place >= copies * parameters


@pytest.mark.parametrize(
    ("optimizer", "plan", "cluster"),
    [
        (torch.optim.AdamW, "dp", "cpu:1"),
        (torch.optim.AdamW, "dp", "cpu:2"),
        (partial(torch.optim.SGD, momentum=0.9), "dp", "cpu:1"),
    ],
)
def test_updates_along_the_backward_pass_save_gradients(optimizer, plan, cluster, monkeypatch):
    """The most memory beside parameters and state, of a model with more parameters than activations, which is cut into
    pieces and buckets as a large one is."""
    monkeypatch.setattr(bucket, "BUCKET", 1 << 14)
    monkeypatch.setattr(inplace, "PIECE", 1 << 14)
    monkeypatch.setitem(models.MODELS, "deep", deep)
    ranks = int(cluster[-1])
    parameters = ranks * sum(p.nbytes for p in deep()[0].parameters())
    stored_bytes = parameters * (3 if optimizer is torch.optim.AdamW else 2)
    early = ours("deep", optimizer, plan, cluster) - stored_bytes
    monkeypatch.setattr(inplace, "_let_go", lambda graph: None)
    late = ours("deep", optimizer, plan, cluster) - stored_bytes
    assert late > parameters and early < 0.5 * late


def deep() -> models.Case:
    """Linear layers on few rows."""
    layers = [nn.Linear(64, 64) for _ in range(12)]
    return nn.Sequential(*layers), {"input": models.random(2, 64)}, lambda model, batch: model(**batch).square().mean()
