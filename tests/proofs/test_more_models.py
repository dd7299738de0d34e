"""Models as their libraries make them, under textbook and random plans: the numbers are those of plain PyTorch.

The reference is an ordinary training loop without Tutti. Losses of every step, gradients of the first one, and the
parameters and buffers after the last one are compared. What is refused is listed, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import more_models
import tutti

STEPS, TOLERANCE = 2, 1e-5

pytestmark = [
    pytest.mark.filterwarnings("ignore:no rule says how to split"),  # slower, and the numbers are the same
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft asks transformers for it
]


class Setting(NamedTuple):
    """How a model is parallelized: the name of a plan, or the seed of a random one."""

    plan: str | int
    devices: int
    accumulate: int = 1


SETTINGS = {
    "dp2": Setting("dp", 2),
    "tp2": Setting("tp", 2),
    "zero3": Setting("zero3", 2),
    "pp2": Setting("pp2", 2, accumulate=2),
    "dp2xtp2": Setting("dp2xtp2", 4),
    "random3": Setting(1, 3),
    "random4": Setting(2, 4),
    "random6": Setting(3, 6),
}
QUICK = {  # run by the normal suite; all others by `make proofs`
    "opt": "dp2", "lora": "tp2", "transformer_xl": "tp2", "vq_vae": "zero3", "moco": "dp2", "deq": "pp2",
    "schnet": "tp2", "gat": "random3", "maml": "random4", "gcn": "random6", "mlp_mixer": "dp2xtp2",
}  # fmt: skip
INDIVISIBLE = (
    "mask2former",
    "gcn",
    "gat",
    "transformer_xl",
    "qwen2_vl",
)  # batches that are no rows to make microbatches of
RANDOM = ("mask2former",)  # compared with Tutti on one device: the model draws random numbers of its own
TOLERANCES = {"mask2former": 1e-3}  # samples between pixels: an ulp in the parameters moves a gradient by 16 %
DOUBLE = ("electra", "unet")  # in float64: float32 rounding of sums that nearly cancel is above the tolerance

SEVERAL_STAGES = "changes with every microbatch, and stages 0, 1 of the pipeline read or write it"
NO_CUT = "cannot be cut into 2 stages: they call each other in turns, or share state that forward changes"
REFUSED = {  # (model, plan, * for every one) -> a part of the message
    ("autoformer", "*"): "the model branches on the values of a tensor",  # x[:, i] with a computed index i
    ("gan", "pp2"): SEVERAL_STAGES,  # spectral norm of a discriminator that is called for two stages
    ("moco", "pp2"): NO_CUT,  # the target's weights follow those of the encoder
    ("maml", "pp2"): NO_CUT,  # gradients of all layers are taken within the forward pass
}
FAULTS: dict[str, str] = {}  # model -> why it fails, though it should not


def setting_of(name: str, plan: str) -> Setting:
    setting = SETTINGS[plan]
    return setting._replace(accumulate=1) if name in INDIVISIBLE else setting


class Numbers(NamedTuple):
    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]  # of the first step
    state: dict[str, torch.Tensor]  # parameters and buffers after the last one


def case(name: str) -> more_models.Case:
    model, batch, loss = more_models.case(name)
    if name in DOUBLE:
        batch = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)
        return model.double(), batch, loss
    return model, batch, loss


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


def rows(tree: Any, begin: int, end: int) -> Any:
    """Some rows of a batch."""
    if isinstance(tree, dict):
        return {key: rows(x, begin, end) for key, x in tree.items()}
    return tree[begin:end]


@cache
def plain(name: str, accumulate: int) -> Numbers:
    """A training loop of plain PyTorch, the gradients of several microbatches averaged."""
    if name in RANDOM:
        return parallel(name, Setting("single", 1, accumulate))
    model, batch, loss = case(name)
    optimizer = optimizer_of(model)
    size = more_models.BATCH // accumulate
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for i in range(accumulate):
            part = rows(batch, i * size, (i + 1) * size) if accumulate > 1 else batch
            value = loss(model, part) if loss else model(**part)
            value = getattr(value, "loss", value) / accumulate
            value.backward()
            total = total + value.detach()
        losses.append(total)
        if step == 0:
            gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Numbers(losses, gradients, {k: x.detach() for k, x in [*model.named_parameters(), *model.named_buffers()]})


def graph_of(name: str) -> Any:
    model, batch, loss = case(name)
    return tutti.capture(model, batch, optimizer_of(model), loss)


def of_kinds(state: dict[str, torch.Tensor], *kinds: str) -> dict[str, torch.Tensor]:
    return {name.partition(":")[2]: x.clone() for name, x in state.items() if name.partition(":")[0] in kinds}


def parallel(name: str, setting: Setting) -> Numbers:
    """The same by `tutti.parallelize`, on virtual devices."""
    plan, devices, accumulate = setting
    plan = plan if isinstance(plan, str) else tutti.random_plan(graph_of(name), devices, plan)
    model, batch, loss = case(name)
    step = tutti.parallelize(
        model, optimizer_of(model), batch, loss=loss, cluster=f"cpu:{devices}", plan=plan, level="O0",
        accumulate=accumulate,
    )  # fmt: skip
    losses = [step(batch)]
    gradients = of_kinds(step.training_state(), "momentum_buffer")  # the first momentum is the gradient
    losses += [step(batch) for _ in range(STEPS - 1)]
    return Numbers(losses, gradients, of_kinds(step.training_state(), "param", "buffer"))


def assert_equal(numbers: Numbers, expected: Numbers, tolerance: float = TOLERANCE) -> None:
    """Within the tolerance of each tensor's norm."""
    for i, (a, b) in enumerate(zip(numbers.losses, expected.losses, strict=True)):
        assert abs(a - b) <= tolerance * abs(b), f"loss {i} is {a}, not {b}"
    largest = max(x.norm() for x in expected.gradients.values())
    for name in numbers.gradients.keys() - expected.gradients.keys():  # of a parameter that the loss does not reach
        assert not numbers.gradients.pop(name).any(), f"gradient {name} is not None"
    pairs = ("gradient", numbers.gradients, expected.gradients), ("state", numbers.state, expected.state)
    for what, ours, theirs in pairs:
        assert ours.keys() == theirs.keys(), f"{what}: {ours.keys() ^ theirs.keys()}"
        for key, tensor in theirs.items():
            if not tensor.is_floating_point():
                assert torch.equal(ours[key], tensor), f"{what} {key} differs"
                continue
            # A gradient that is zero in exact arithmetic, as a key bias' is, is rounding noise of the others.
            scale = max(tensor.norm(), 1e-2 * largest)
            error = (ours[key] - tensor).norm() / scale
            assert error <= tolerance, f"{what} {key} differs by {error:.1e}"


def reason(name: str, plan: str) -> str | None:
    """The message of a refusal that is expected."""
    return REFUSED.get((name, "*")) or REFUSED.get((name, plan))


def marks(name: str, plan: str) -> list[pytest.MarkDecorator]:
    slow = [] if QUICK.get(name) == plan else [pytest.mark.slow]
    return slow + ([pytest.mark.xfail(strict=True, reason=FAULTS[name])] if name in FAULTS else [])


CASES = [pytest.param(name, plan, marks=marks(name, plan)) for name in more_models.MODELS for plan in SETTINGS]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_any_plan_gives_the_numbers_of_plain_torch(name, plan):
    setting = setting_of(name, plan)
    if part := reason(name, plan):
        with pytest.raises(ValueError, match=re.escape(part)):
            parallel(name, setting)
    else:
        assert_equal(parallel(name, setting), plain(name, setting.accumulate), TOLERANCES.get(name, TOLERANCE))


def test_every_refusal_is_of_a_case_that_there_is():
    """Run with -s it prints how many of the cases are refused, and why."""
    reasons = Counter(part for name in more_models.MODELS for plan in SETTINGS if (part := reason(name, plan)))
    total = len(more_models.MODELS) * len(SETTINGS)
    print(f"\n{total} cases of {len(more_models.MODELS)} models; {sum(reasons.values())} are refused:")
    print(*(f"{count:4} {part}" for part, count in reasons.most_common()), sep="\n")
    assert all(name in more_models.MODELS and plan in (*SETTINGS, "*") for name, plan in REFUSED)
    assert QUICK.keys() | FAULTS.keys() <= more_models.MODELS.keys()
