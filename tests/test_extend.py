"""What users register runs a step with the numbers of plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tutti
from tutti.hardware import PRESETS, Device, Link
from tutti.plan.pipeline.schedule import REGISTERED, schedule_of
from tutti.tracing.rewrite.pattern_table import PATTERNS

EQUAL = ((1.0, 1.0, 1.0, 0.0),) * 4


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def loss_of(model, batch):
    return model(batch[0]).square().mean()


def losses_of(model, plan, devices, steps=3, **options):
    """Losses of a step and of the same loop in plain PyTorch."""
    batch, plain = (torch.randn(8, 6),), copy.deepcopy(model)
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch, loss=loss_of,
                             cluster=f"cpu:{devices}", plan=plan, level="O0", **options)  # fmt: skip
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        expected.append(loss_of(plain, batch).item())
        optimizer.step()
    return step, [step(batch).item() for _ in range(steps)], expected


@pytest.fixture
def schedules():
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def backwards_first(devices, microbatches, kinds="FB", chunks=1):
    """Every device runs one microbatch at a time, so that no two devices are ever busy at once."""
    stages = range(devices * chunks)
    return [
        [
            tutti.Slot(kind, s, m)
            for m in range(microbatches)
            for kind in kinds
            for s in (stages if kind == "F" else reversed(stages))
            if s % devices == d
        ]
        for d in range(devices)
    ]


@pytest.mark.parametrize("chunks, split", [(1, False), (2, False), (1, True)])
def test_a_schedule_gives_the_numbers_of_plain_pytorch(schedules, chunks, split):
    @tutti.register_schedule("one-at-a-time", chunks=chunks, split=split)
    def one_at_a_time(devices, microbatches):
        return backwards_first(devices, microbatches, "FBW" if split else "FB", chunks)

    step, losses, expected = losses_of(deep(), "pp2-one-at-a-time", 2, accumulate=4)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert step.plan.schedule == "one-at-a-time" and "pp2-one-at-a-time" in repr(step)
    assert tutti.Plan.from_json(step.plan.to_json()) == step.plan


def test_a_schedule_with_a_place_of_its_own(schedules):
    @tutti.register_schedule("folded", chunks=2, place=lambda stage, devices: min(stage, 2 * devices - 1 - stage))
    def folded(devices, microbatches):
        order = {0: (0, 3), 1: (1, 2)}
        return [
            [tutti.Slot(k, s, m) for m in range(microbatches) for k in "FB" for s in order[d][:: 1 if k == "F" else -1]]
            for d in range(devices)
        ]

    _, losses, expected = losses_of(deep(), "pp2-folded", 2, accumulate=2)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "slots, message",
    [
        (lambda p, m: [[], []], "device 0 lacks Slot"),
        (lambda p, m: [[tutti.Slot("F", 0, 0)] * 2] * 2, "device 0 lacks Slot"),
        (
            lambda p, m: [s + s[:1] for s in backwards_first(p, m)],
            r"device 0 has an extra Slot\(kind='F', stage=0, .*\) at position 4, again",
        ),
        (lambda p, m: backwards_first(p, m)[::-1], "device 0 lacks Slot"),
        (lambda p, m: [[("F", 0, 0)], []], r"wrong: device 0, position 0: \('F', 0, 0\) is not a tutti.Slot"),
        (lambda p, m: backwards_first(p, m)[:1], "the slots of 1 devices, not of 2"),
        (
            lambda p, m: [s[::-1] for s in backwards_first(p, m)],
            r"device 0 at position 0, Slot\(kind='B', stage=0, microbatch=1, slice=0\), device 1 at position 0, Slot",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_an_error(schedules, slots, message):
    tutti.register_schedule("wrong")(slots)
    with pytest.raises(ValueError, match=message):
        schedule_of("wrong", 2, 2, 2)


@pytest.mark.parametrize(
    "name, message",
    [
        ("exact", "lower-case letters except 'x'"),
        ("Mine", "lower-case"),
        ("1f1b", "there is a schedule '1f1b' already"),
    ],
)
def test_names_of_schedules(schedules, name, message):
    with pytest.raises(ValueError, match=message):
        tutti.register_schedule(name)


def test_a_schedule_has_as_many_stages_as_it_says(schedules):
    tutti.register_schedule("mine")(backwards_first)
    with pytest.raises(ValueError, match="mine has 1 stages on each device: 2, not 4"):
        schedule_of("mine", 2, 4, 2)


@pytest.fixture
def presets():
    before = dict(PRESETS)
    yield
    PRESETS.clear()
    PRESETS.update(before)


CHIP = Device("chip", {"float32": 1e12, "bfloat16": 4e12}, 16 * 2**30, 500e9, {"bfloat16": 0.7}, 5e-6)


def test_a_device_is_planned_for_and_runs_virtually(presets):
    tutti.register_device(CHIP, inside=[(4, Link(100e9, 2e-6))], between=Link(10e9, 1e-5))
    cluster = tutti.Cluster.parse("chip:3x4")
    assert cluster.size == 12 and [link.bandwidth for _, link in cluster.levels] == [100e9, 10e9]
    assert tutti.Cluster.from_json(cluster.to_json()) == cluster
    batch, model = (torch.randn(8, 6),), deep()
    expected = loss_of(model, batch).item()
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters()), batch, loss=loss_of, cluster="chip:4",
                             plan="dp2xtp2", level="O0")  # fmt: skip
    assert step(batch).item() == pytest.approx(expected, rel=1e-5) and "on chip:4" in step.plan.explain()


def test_a_device_has_one_entry_and_a_name_that_can_be_read(presets):
    link = Link(1e9, 1e-6)
    with pytest.raises(ValueError, match="device 'cpu' is already registered"):
        tutti.register_device(Device("cpu", {}, 1, 1), inside=[(1, link)], between=link)
    with pytest.raises(ValueError, match="a name is letters"):
        tutti.register_device(Device("my chip", {}, 1, 1), inside=[(1, link)], between=link)
    with pytest.raises(ValueError, match="levels of at least one member"):
        tutti.register_device(Device("chip", {}, 1, 1), inside=[], between=link)


@torch.library.custom_op("tutti_tests::relu2", mutates_args=())
def relu2(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0).square()


@torch.library.custom_op("tutti_tests::relu2_backward", mutates_args=())
def relu2_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return 2 * grad * x.clamp(min=0)


relu2.register_fake(torch.empty_like)
relu2_backward.register_fake(lambda grad, x: torch.empty_like(x))
relu2.register_autograd(lambda ctx, grad: relu2_backward(grad, *ctx.saved_tensors),
                        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))  # fmt: skip


class Squared(nn.Module):
    def forward(self, x):
        return torch.relu(x).square()


@pytest.fixture
def patterns():
    before = list(PATTERNS)
    yield
    PATTERNS[:] = before


def pattern(replacement=relu2, anchor=torch.ops.aten.relu.default) -> tutti.Pattern:
    return tutti.Pattern("squared ReLU", "tutti_tests::relu2", lambda x: torch.relu(x).square(), replacement, ((4, 6),),
                         anchor, learned=(0,))  # fmt: skip


def test_a_pattern_is_replaced_and_gives_the_numbers_of_plain_pytorch(patterns):
    tutti.rule("tutti_tests::relu2", "a b -> a b")
    tutti.rule("tutti_tests::relu2_backward", "a b, a b -> a b | ~0")
    tutti.register_pattern(pattern())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), Squared(), nn.Linear(12, 6))
    step, losses, expected = losses_of(model, "dp2xtp2", 4)
    assert losses == pytest.approx(expected, rel=1e-5) and step.graph.matches == {"squared ReLU": 1}
    targets = [str(node.target) for node in step.graph.calls]
    assert "tutti_tests.relu2.default" in targets and "aten.relu.default" not in targets


def test_a_pattern_that_is_wrong_is_refused(patterns):
    with pytest.raises(ValueError, match="the replacement gives other results or gradients"):
        tutti.register_pattern(pattern(replacement=torch.relu))
    with pytest.raises(ValueError, match=r"the reference has no aten.tanh.default; it has aten.relu.default, aten.pow"):
        tutti.register_pattern(pattern(anchor=torch.ops.aten.tanh.default))
    assert not any(p.name == "squared ReLU" for p in PATTERNS)
