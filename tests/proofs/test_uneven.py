"""Sizes that the devices do not divide: a vocabulary, heads, a batch or a sequence on 3, 4, 7 and 8 devices.

Losses and parameters are those of a plain PyTorch loop, ZeRO keeps the rounded-up share of every tensor, and processes
agree with virtual devices.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tutti
from cases import slow, some
from tutti.plan.layouts.layout import coordinates_of
from tutti.plan.random import random_plan

BATCH, LENGTH, HEADS, WIDTH = 10, 13, 12, 60
SMALL, WHOLE = 503, 50257  # sizes of the vocabulary: a prime number, and GPT-2's
STEPS = 3
PLANS = ("dp", "tp", "zero1", "zero2", "zero3", "cp", "cpxzero3", "pp2", "random0", "random1")
QUICK = [("tp", 7), ("zero3", 7), ("cpxzero3", 3), ("pp2", 8), ("random0", 4)]
CASES = [(plan, n) for n in (3, 4, 7, 8) for plan in PLANS if plan != "pp2" or n % 2 == 0]


def model_of(vocabulary: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=HEADS, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, loss_type="ForCausalLM",
    ))  # fmt: skip


def optimizer_of(model: GPT2LMHeadModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(vocabulary, (BATCH, LENGTH), generator=draw) for _ in range(STEPS)]
    return [{"input_ids": x, "labels": x} for x in tokens]


@cache
def expected(vocabulary: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of the loop that a person writes for one device."""
    model, losses = model_of(vocabulary), []
    optimizer = optimizer_of(model)
    for batch in batches(vocabulary):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def lifted(name: str, devices: int, vocabulary: int) -> tutti.Step:
    model = model_of(vocabulary)
    optimizer, data, plan = optimizer_of(model), batches(vocabulary)[0], name
    if name.startswith("random"):
        one = tutti.parallelize(model, optimizer, data, cluster="cpu:1", plan="single", level="O0")
        plan = random_plan(one, devices, int(name.removeprefix("random")))
        model = model_of(vocabulary)
        optimizer = optimizer_of(model)
    elif name == "pp2":
        plan = f"pp2xdp{devices // 2}"
    return tutti.parallelize(model, optimizer, data, cluster=f"cpu:{devices}", plan=plan, level="O0")


def trained(name: str, devices: int, vocabulary: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    step = lifted(name, devices, vocabulary)
    return [step(batch).item() for batch in batches(vocabulary)], step.state_dict()


def assert_equal(losses: list[float], state: dict[str, torch.Tensor], vocabulary: int) -> None:
    wanted, parameters = expected(vocabulary)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for name, parameter in parameters.items():
        error = (state[name] - parameter).norm() / parameter.norm().clamp(min=1e-3)
        assert error <= 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(("plan", "devices"), some([*QUICK, ("dp", 4), ("zero1", 3), ("cp", 7)], QUICK))
def test_a_prime_vocabulary(plan, devices):
    assert_equal(*trained(plan, devices, SMALL), SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "devices"), CASES)
def test_the_vocabulary_of_gpt2(plan, devices):
    assert_equal(*trained(plan, devices, WHOLE), WHOLE)


@pytest.mark.parametrize(("plan", "devices", "share"), [slow("zero1", 7, "optimizer"), ("zero3", 7, "all")])
def test_zero_keeps_the_rounded_up_share(plan, devices, share):
    """Each rank has, of every dim that is split, floor or ceil(n / devices) entries; the parts make up the tensor."""
    program = lifted(plan, devices, SMALL).program
    split = {}
    for name, (layout, spec) in program.inputs.items():
        if name.startswith("momentum_buffer:" if share == "optimizer" else ("momentum_buffer:", "param:")):
            (placed,) = layout.splits.values()
            split[name] = placed
            shapes = [layout.local_shape(spec.shape, program.mesh, coordinates_of(i, program.mesh)) for i in
                      range(devices)]  # fmt: skip
            assert shapes[0][placed.dim] <= ceil(spec.shape[placed.dim] / devices)
            assert sum(map(prod, shapes)) == prod(spec.shape)
    assert len(split) == (1 + (share == "all")) * len(expected(SMALL)[1])
    assert any(placed.unit for placed in split.values()), "no dim is split unevenly"


def _on_processes(plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(plan, 4, SMALL)


@pytest.mark.parametrize("plan", ["zero3", slow("tp"), slow("cpxzero3"), slow("dp")])
def test_processes(plan, pool):
    for losses, state in pool.run(_on_processes, plan):
        assert_equal(losses, state, SMALL)
