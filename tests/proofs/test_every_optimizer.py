"""Whatever the optimizer and the plan, parameters are those of plain PyTorch on one device."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import tutti
from cases import crossed, some
from tutti.tracing.optimizers import TABLE

STEPS = 3
QUICK = ["dp2", "tp2", "zero3", "zero3 by 2"]  # plans, and how many microbatches they take
PLANS = [*QUICK, "dp2 by 2", "tp2 by 2", "pp2", "pp2 by 2", "zero3xoffload2"]
OPTIONS = {
    torch.optim.SGD: {"momentum": 0.9, "dampening": 0.3},
    torch.optim.Adagrad: {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
    torch.optim.ASGD: {"lambd": 0.1, "t0": 1, "lr": torch.tensor(0.01)},
    torch.optim.NAdam: {"decoupled_weight_decay": True, "weight_decay": 0.1},
    torch.optim.Adafactor: {"weight_decay": 0.1},
}

# State that is 0-d, factored, or does not start at zero; the others run with `make proofs`.
STATES = (torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.NAdam)
SOME = some(TABLE, STATES)


class MLP(torch.nn.Module):
    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        sizes = ((8, 16), (16, 4))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*size, bias=bias, dtype=dtype) for size in sizes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return (x.float() - y).square().mean()


def setup(cls, dtype=torch.float32):
    """A model and an optimizer of it; Muon takes no biases."""
    model = MLP(bias=cls is not torch.optim.Muon, dtype=dtype)
    return model, cls(model.parameters(), **OPTIONS.get(cls, {}))


@functools.cache
def batches(dtype=torch.float32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator)
    return [{"x": draw(8, 8).to(dtype), "y": draw(8, 4)} for _ in range(2 * STEPS)]


def plain_torch(model, optimizer, data) -> dict[str, torch.Tensor]:
    for batch in data:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return model.state_dict()


@functools.cache
def expected(cls) -> dict[str, torch.Tensor]:
    return plain_torch(*setup(cls), batches()[:STEPS])


def assert_equal(state, wanted, tolerance=1e-5) -> None:
    for name, exact in wanted.items():
        error = (state[name] - exact).norm() / exact.norm()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


ONCE = [(cls, QUICK[i % len(QUICK)]) for i, cls in enumerate(TABLE)]


@pytest.mark.parametrize("cls, plan", crossed(TABLE, PLANS, quick=ONCE))
def test_plans(cls, plan):
    name, _, accumulate = plan.partition(" by ")
    step = tutti.parallelize(
        *setup(cls), batches()[0], cluster="cpu:2", plan=name, level="O0", accumulate=int(accumulate or 1)
    )
    for batch in batches()[:STEPS]:
        step(batch)
    assert_equal(step.state_dict(), expected(cls))


@pytest.mark.parametrize("plan", ["single", "zero3"])
@pytest.mark.parametrize("cls", TABLE)
def test_steps_of_pytorch_itself_between(cls, plan):
    """The optimizer has its state and counts after a step, and the step goes on with what PyTorch has made of them."""
    model, optimizer = setup(cls)
    cluster = "cpu:1" if plan == "single" else "cpu:2"
    step = tutti.parallelize(model, optimizer, batches()[0], cluster=cluster, plan=plan, level="O0")
    for i, batch in enumerate(batches()):
        if i % 3 == 1:
            plain_torch(model, optimizer, [batch])
        else:
            step(batch)
    reference, theirs = setup(cls)
    assert_equal(model.state_dict(), plain_torch(reference, theirs, batches()))
    ours, wanted = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    assert ours.keys() == wanted.keys()
    for number, entries in wanted.items():
        assert ours[number].keys() == entries.keys()
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours[number][key], value, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("cls", SOME)
def test_goes_on_from_a_stepped_optimizer_and_from_a_checkpoint(cls, tmp_path):
    """Three steps in PyTorch, two under one plan, the last under another."""
    model, optimizer = setup(cls)
    wanted = plain_torch(*setup(cls), batches())
    plain_torch(model, optimizer, batches()[:3])
    first = tutti.parallelize(model, optimizer, batches()[0], cluster="cpu:2", plan="zero3", level="O0")
    for batch in batches()[3:5]:
        first(batch)
    checkpoints = tutti.Checkpoints(tmp_path)
    first.save(checkpoints)
    checkpoints.wait()
    second = tutti.parallelize(*setup(cls), batches()[0], cluster="cpu:2", plan="tp2", level="O0")
    second.load(checkpoints.latest())
    second(batches()[5])
    assert_equal(second.state_dict(), wanted)


@pytest.mark.parametrize("cls", SOME)
def test_bfloat16_with_masters(cls):
    """Gradients are those of bfloat16 parameters; the update is the float32 one of the masters."""
    model, optimizer = setup(cls, torch.bfloat16)
    reference, _ = setup(cls, torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    exact = cls(masters, **OPTIONS.get(cls, {}))
    data = batches(torch.bfloat16)
    step = tutti.parallelize(
        model, optimizer, data[0], cluster="cpu:1", plan="single", level="O0", fp32_master_weights=True
    )
    for batch in data[:STEPS]:
        step(batch)
        reference.zero_grad()
        reference(**batch).backward()
        for master, p in zip(masters, reference.parameters(), strict=True):
            master.grad = p.grad.float()
        exact.step()
        with torch.no_grad():
            for master, p in zip(masters, reference.parameters(), strict=True):
                p.copy_(master)
    state = step.training_state()
    names = [name for name, _ in model.named_parameters()]
    ours = {name: state[f"master:{name}"] for name in names}
    assert_equal(ours, dict(zip(names, (m.detach() for m in masters), strict=True)))


@pytest.mark.parametrize("cls", SOME)
def test_a_skipped_step_changes_nothing(cls):
    step = tutti.parallelize(
        *setup(cls), batches()[0], cluster="cpu:2", plan="zero3", level="O0", max_nonfinite_steps=1
    )
    step(batches()[0])
    before = step.training_state()
    bad = copy.deepcopy(batches()[1])
    bad["x"][0, 0] = torch.nan
    step(bad)
    after = step.training_state()
    assert after.pop("step") == before.pop("step") + 1 and after.pop("skipped") == 1
    assert all(torch.equal(x, before[name]) for name, x in after.items())


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "single"])
@pytest.mark.parametrize("cls", TABLE)
def test_compiled(cls, plan):
    devices = 1 if plan == "single" else 2
    step = tutti.parallelize(*setup(cls), batches()[0], cluster=f"cpu:{devices}", plan=plan, level="O2")
    for batch in batches()[:STEPS]:
        step(batch)
    assert_equal(step.state_dict(), expected(cls))
