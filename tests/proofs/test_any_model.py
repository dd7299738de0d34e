"""Any model, any legal plan: loss, gradients and updated parameters are those of one device.

Plans are drawn at random from all that the rules allow, so operators are split in ways that no planner would choose.
No operator of any of these models is computed whole for lack of a rule.
"""

from __future__ import annotations

import operator

import pytest
import torch

import models
import tutti
from cases import crossed, some
from tutti.ops import rule_of

DEVICES = (2, 3, 4, 6, 8)
PLANS = 8
QUICK = ("gemma2", "vit", "deepseek", "mixture", "resnet", "dlrm", "lstm")  # models of which one plan is
THIRD = some(models.MODELS, QUICK)
TOLERANCE = 1e-5
KINDS = ("momentum_buffer", "param", "buffer")


def parallelize(name: str, cluster: str, plan) -> tutti.Step:
    model, batch, loss = models.case(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return tutti.parallelize(model, optimizer, batch, loss=loss, cluster=cluster, plan=plan, level="O0")


def one_step(step: tutti.Step, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss; gradients (the first momentum is the gradient), updated parameters and buffers by name."""
    loss = step(batch)
    return loss, {k: v for k, v in step.training_state().items() if k.split(":")[0] in KINDS}


@pytest.fixture(scope="module")
def whole() -> dict:
    """What one device gives, by model; made on demand."""
    return {}


def expected(name: str, whole: dict):
    if name not in whole:
        step = parallelize(name, "cpu:1", "single")
        whole[name] = step, *one_step(step, models.case(name)[1])
    return whole[name]


def skip_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if getattr(module, "p", 0) or (isinstance(module, torch.nn.LSTM) and module.dropout):
            pytest.skip("dropout draws other numbers than torch does")


@pytest.mark.parametrize("name", THIRD)
def test_one_device_gives_the_loss_of_plain_torch(name, whole):
    model, batch, loss = models.case(name)
    torch.manual_seed(0)
    skip_dropout(model)
    value = loss(model, batch) if loss else model(**batch)
    torch.testing.assert_close(expected(name, whole)[1], getattr(value, "loss", value).detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", THIRD)
def test_every_operator_has_a_rule(name, whole):
    graph = expected(name, whole)[0].graph
    without = {str(n.target) for n in graph.calls if n.target is not operator.getitem and rule_of(n) is None}
    assert without == set()


CASES = crossed(models.MODELS, range(PLANS), quick=[(name, 0) for name in QUICK])


def assert_equal(name: str, sharded, single) -> None:
    """Loss, gradients, updated parameters and buffers, each within the tolerance of its norm."""
    (loss, ours), (expected_loss, expected) = sharded, single
    assert abs(loss - expected_loss) <= TOLERANCE * abs(expected_loss)
    assert ours.keys() == expected.keys()
    largest = max(t.norm() for k, t in expected.items() if k.startswith("momentum"))
    for key, tensor in expected.items():
        # A gradient that is zero in exact arithmetic, as a key bias' is, is rounding noise of the others.
        scale = max(tensor.float().norm(), 1e-2 * largest)
        error = (ours[key].float() - tensor.float()).norm() / scale
        assert error <= TOLERANCE, f"{key} of {name} differs by {error:.1e}"


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_random_plan_gives_the_numbers_of_one_device(name, seed, whole):
    step, *single = expected(name, whole)
    devices = DEVICES[(seed + list(models.MODELS).index(name)) % len(DEVICES)]
    plan = tutti.random_plan(step.graph, devices, seed)
    assert_equal(
        f"{name} on {plan.mesh}", one_step(parallelize(name, f"cpu:{devices}", plan), models.case(name)[1]), single
    )


def run_in_job(name: str, plan: tutti.Plan):
    """One rank of four."""
    return one_step(parallelize(name, "auto", plan), models.case(name)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edsr", "llama", "lstm", "dlrm"])
def test_gloo_processes_too(name, whole, pool):
    step, *single = expected(name, whole)
    plan = tutti.random_plan(step.graph, 4, 1)
    for sharded in pool.run(run_in_job, name, plan):
        assert_equal(f"{name} on {plan.mesh}", sharded, single)


class Resized(torch.nn.Module):
    """Up-sampling by a scale that is no whole number of times, an LSTM without biases, a pool that rounds up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lstm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.LSTM(8, 6, bias=False)

    def forward(self, x):
        x = torch.nn.functional.interpolate(self.conv(x), scale_factor=1.7, mode="nearest")
        x = torch.nn.functional.max_pool2d(x, 3, 2, ceil_mode=True)
        return self.lstm(x.flatten(2).mT[:, :, [0, 1, 2, 3, 3, 2, 1, 0]])[0].square().mean()


def test_odd_scales_and_missing_biases():
    x = models.images(5)
    reference = Resized()
    reference(x).backward()
    model = Resized()
    graph = tutti.capture(model, (x,), torch.optim.SGD(model.parameters(), lr=1.0))
    for plan, devices in [("single", 1), *((tutti.random_plan(graph, 4, seed), 4) for seed in range(4))]:
        model = Resized()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = tutti.parallelize(model, optimizer, (x,), cluster=f"cpu:{devices}", plan=plan, level="O0")
        torch.testing.assert_close(step.gradients((x,)), {n: p.grad for n, p in reference.named_parameters()})
        torch.testing.assert_close(step((x,)), reference(x).detach())


@pytest.mark.parametrize("name", some(models.MODELS, ("llama", "resnet")))
def test_the_model_is_trained_itself(name, whole):
    """After steps under a random plan, the model has the values of plain PyTorch, and a step of PyTorch goes on."""
    plan = tutti.random_plan(expected(name, whole)[0].graph, 2, seed=7)
    runs = []
    for is_ours in (True, False):
        model, batch, loss = models.case(name)
        skip_dropout(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def plain(model=model, batch=batch, loss=loss, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            value = loss(model, batch) if loss else model(**batch)
            getattr(value, "loss", value).backward()
            optimizer.step()

        if is_ours:
            step = tutti.parallelize(model, optimizer, batch, loss=loss, cluster="cpu:2", plan=plan, level="O0")
        for _ in range(3):
            step(batch) if is_ours else plain()
        states = [{key: x.clone() for key, x in model.state_dict().items()}]
        plain()
        runs.append([*states, model.state_dict()])
    for ours, theirs in zip(*runs, strict=True):
        largest = max(x.float().norm() for x in theirs.values())
        for key, x in theirs.items():
            error = (ours[key].float() - x.float()).norm()
            assert error <= TOLERANCE * max(x.float().norm(), 1e-2 * largest), f"{key}: {error:.1e}"
