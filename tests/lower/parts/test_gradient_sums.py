"""Gradients of microbatches are added in float32 where the plan says so, and predicted memory counts it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from cases import slow
from liveness import most_alive
from tutti.lower.parts import gradient_sums
from tutti.lower.parts.schedule_parts import schedule_of
from tutti.plan.plan import Plan
from tutti.sim.dryrun import dry_run

ROWS, WIDTH, COUNT = 64, 16, 16
BF16 = torch.bfloat16


def step_and_batch(
    plan: str, optimizer=torch.optim.AdamW, masters: bool = True, devices: int = 2, level: str = "O0", **options
):
    """A step of 16 microbatches, and its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)).to(BF16)
    x = torch.randn(ROWS, WIDTH).to(BF16)
    step = tutti.parallelize(
        model, optimizer(model.parameters(), lr=1e-2), (x,), loss=lambda m, b: m(*b).float().square().mean(),
        cluster=f"cpu:{devices}", plan=plan, level=level, accumulate=COUNT, fp32_master_weights=masters, **options,
    )  # fmt: skip
    return step, (x,)


def by_hand() -> dict[str, torch.Tensor]:
    """Gradients of the microbatches in bfloat16, added in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)).to(BF16)
    x = torch.randn(ROWS, WIDTH).to(BF16)
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for part in x.chunk(COUNT):
        model.zero_grad()
        model(part).float().square().mean().backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.float() / COUNT
    return sums


def off(gradients: dict[str, torch.Tensor]) -> float:
    expected = by_hand()
    return max(float((gradients[n].float() - g).norm() / g.norm()) for n, g in expected.items())


def test_sums_are_those_of_float32():
    low, batch = step_and_batch("single", devices=1)
    assert off(low.gradients(batch)) > 1e-3  # sums in bfloat16 round
    step, batch = step_and_batch("singlexfp32sums", devices=1)
    assert step.plan.sum_dtype == "float32" and off(step.gradients(batch)) < 1e-6
    assert "gradients added in float32" in step.plan.explain()
    assert Plan.from_json(step.plan.to_json()) == step.plan


@pytest.mark.parametrize(
    ("plan", "devices"), [("dp2xfp32sums", 2), slow("zero2xfp32sums", 2), ("pp2xfp32sums", 2), slow("tp2xfp32sums", 2)]
)
def test_an_update_from_float32_sums(plan, devices):
    """What a step with float32 sums changes is nearer to a step in float32 than with sums in bfloat16."""
    masters = {}
    for name in (plan, plan.removesuffix("xfp32sums")):
        step, batch = step_and_batch(name, torch.optim.SGD, devices=devices)
        step(batch)
        masters[name] = step.state_dict()
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)).to(BF16).state_dict()
    expected = by_hand()

    def error(name: str) -> float:
        state = masters[name]
        return max(float((state[n].float() - (start[n].float() - 1e-2 * g)).norm()) for n, g in expected.items())

    assert error(plan) <= error(plan.removesuffix("xfp32sums"))


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_updates_read_float32_sums(optimizer, masters):
    step, _ = step_and_batch("dp2xfp32sums", optimizer, masters)
    cut, _ = schedule_of(step.graph, step.plan, COUNT)
    assert cut.wide_sums == dict.fromkeys(step.graph.gradient_names, True)


def test_another_update_reads_sums_that_are_rounded_once(monkeypatch):
    monkeypatch.setattr(gradient_sums, "ADAM", set())
    step, batch = step_and_batch("dp2xfp32sums", masters=False)
    cut, _ = schedule_of(step.graph, step.plan, COUNT)
    assert not any(cut.wide_sums.values())
    step(batch)
    assert all(tensor.dtype in (BF16, torch.int64) for tensor in step.state_dict().values())


def test_memory_counts_what_sums_take():
    kinds = {}
    for name in ("dp2", "dp2xfp32sums"):
        step, _ = step_and_batch(name)
        predicted = dry_run(step.graph, step.plan, step.cluster)
        kinds[name] = predicted.parts[0].simulation.memory[0].kinds["accumulated gradients"]
        elements = sum(step.graph.spec(f"param:{n}").numel for n in step.graph.names("param"))
    assert kinds["dp2"] == 2 * elements and kinds["dp2xfp32sums"] == 4 * elements


@pytest.mark.parametrize("plan, devices", [("single", 1), ("pp2", 2)])
def test_a_microbatch_does_not_hold_the_gradients_of_all_parameters(plan, devices):
    torch.manual_seed(0)
    layers = 8
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))), torch.randn(4, 64)
    step = tutti.parallelize(
        model, torch.optim.AdamW(model.parameters()), (x,), loss=lambda m, b: m(*b).square().mean(),
        cluster=f"cpu:{devices}", plan=plan, level="O0", accumulate=2,
    )  # fmt: skip
    step((x,))
    _, measured = most_alive(lambda state, data: step(data), step.store.parts, (x,))
    gradients = sum(p.nbytes for p in model.parameters())
    state_bytes = 4 * gradients  # parameters, two moments and the sums
    assert measured - state_bytes < 0.5 * gradients
    assert measured >= dry_run(step.graph, step.plan, step.cluster).memory.peak


def test_a_dtype_that_sums_cannot_have():
    step, _ = step_and_batch("dp2")
    with pytest.raises(ValueError, match="sum_dtype 'float16': gradients are added in 'float32'"):
        step.plan.replace(sum_dtype="float16").check(step.graph)
