"""What changes after a step was captured does not go unnoticed: held against plain PyTorch, or an error."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import edges
import tutti
from cases import slow
from tutti.exec.executables import MOST
from tutti.exec.observed import CheckFailed

PLANS = [("single", 1, 1), ("dp2", 2, 1), ("zero3", 2, 1), ("pp2", 2, 2)]
SOME = [PLANS[0], slow(PLANS[1]), slow(PLANS[2]), PLANS[3]]


class Net(edges.Net):
    """Has a dropout of 0, a scale that forward reads, and a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale, self.epoch = nn.BatchNorm1d(edges.WIDTH), 1.0, 0

    def between(self, x):
        return self.norm(torch.tanh(x)) * self.scale


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def compare(changes: list[Callable], plan=("single", 1, 1), make=Net, optimizer=adam, rtol=1e-5) -> tutti.Step:
    """Two steps before and after each change of (model, optimizer), here and in plain PyTorch."""
    name, devices, microbatches = plan
    batch = edges.points()
    theirs, ours = make(), make()
    their_optimizer, our_optimizer = optimizer(theirs), optimizer(ours)
    step = tutti.parallelize(ours, our_optimizer, batch, cluster=f"cpu:{devices}", plan=name, level="O0",
                             accumulate=microbatches)  # fmt: skip
    size = edges.ROWS // microbatches
    for change in [lambda model, optimizer: None, *changes]:
        change(theirs, their_optimizer), change(ours, our_optimizer)
        for _ in range(2):
            their_optimizer.zero_grad()
            total = 0.0
            for k in range(microbatches):
                loss = theirs(**{key: x[k * size : (k + 1) * size] for key, x in batch.items()}) / microbatches
                loss.backward()
                total += loss.item()
            their_optimizer.step()
            assert step(batch).item() == pytest.approx(total, rel=rtol)
    state = step.state_dict()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=rtol, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    return step


@pytest.mark.parametrize("plan", SOME)
def test_parameters_that_are_frozen_and_freed(plan):
    """Adam counts the updates of each parameter, so that one that rested is corrected otherwise than the rest."""
    compare(
        [
            lambda model, optimizer: model.up.requires_grad_(False),
            lambda model, optimizer: model.up.requires_grad_(True),
            lambda model, optimizer: model.down.bias.requires_grad_(False),
        ],
        plan,
    )


@pytest.mark.parametrize("plan", SOME)
def test_a_submodule_that_goes_to_evaluation_and_back(plan):
    step = compare([lambda model, optimizer: model.norm.eval(), lambda model, optimizer: model.norm.train()], plan)
    assert len(step._executables.plans) == 2 and any("norm.training is False" in reason for reason in step.recaptures)


@pytest.mark.parametrize("plan", SOME[:3])
def test_an_attribute_that_forward_reads(plan):
    def double(model, optimizer):
        model.scale = 2.0

    step = compare([double], plan)
    assert step.recaptures == ["scale is 2.0 now"]


def test_an_attribute_that_forward_does_not_read_costs_one_capture_and_no_compilation():
    def count(model, optimizer):
        model.epoch += 1

    step = compare([count, count])
    assert len(step._executables.plans) == len(step._executables.executors) == 1 and len(step.recaptures) == 2


@pytest.mark.parametrize("plan", SOME)
def test_a_group_and_a_module_that_are_added(plan):
    def make():
        model = Net()
        model.extra = nn.Linear(edges.WIDTH, edges.WIDTH)
        model.between = lambda x: model.norm(torch.tanh(x)) + (model.extra(x) if model.scale > 1 else 0)
        return model

    def optimizer(model):
        return torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("extra")], lr=0.05)

    def add(model, optimizer):
        model.scale = 2.0
        optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 0.1})

    compare([add], plan, make, optimizer)


def test_a_head_that_is_replaced():
    def replace(model, optimizer):
        torch.manual_seed(5)
        model.down = nn.Linear(edges.WIDTH, edges.CLASSES)
        optimizer.add_param_group({"params": list(model.down.parameters())})
        optimizer.param_groups[0]["params"] = [p for n, p in model.named_parameters() if not n.startswith("down")]

    compare([replace], ("dp2", 2, 1))


def test_updates_per_parameter_go_through_checkpoints(tmp_path):
    batch, model = edges.points(), Net()
    step = tutti.parallelize(model, adam(model), batch, cluster="cpu:2", plan="dp2", level="O0")
    step(batch)
    model.up.requires_grad_(False)
    step(batch), step(batch)
    model.up.requires_grad_(True)
    step(batch)
    checkpoints = tutti.Checkpoints(tmp_path)
    step.save(checkpoints)
    checkpoints.wait()
    fresh = Net()
    again = tutti.parallelize(fresh, adam(fresh), batch, cluster="cpu:2", plan="zero3", level="O0")
    again.load(checkpoints.latest())
    moved = Net()
    third = tutti.parallelize(moved, adam(moved), batch, level="O0", plan="single")
    third.load_training_state(step.training_state())
    expected = [step(batch).item() for _ in range(2)]
    assert [again(batch).item() for _ in range(2)] == pytest.approx(expected, rel=1e-6)
    assert [third(batch).item() for _ in range(2)] == pytest.approx(expected, rel=1e-6)


def test_hooks_and_constants_of_the_optimizer():
    model, batch = Net(), edges.points()
    optimizer = adam(model)
    step = tutti.parallelize(model, optimizer, batch, level="O0")
    step(batch)
    handle = optimizer.register_step_post_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"has the hook .*captured update runs no hooks"):
        step(batch)
    handle.remove()
    optimizer.param_groups[0]["eps"] = 1.0
    with pytest.raises(ValueError, match="eps of parameter group 0 was"):
        step(batch)


# -- values that forward reads ---------------------------------------------------------------------------------------


class Masked(edges.Net):
    def forward(self, x, y, mask):
        if not mask.all():
            x = x * mask
        return super().forward(x, y)


def test_other_values_of_the_batch_are_captured_once():
    batch = {**edges.points(), "mask": torch.ones(edges.ROWS, 1)}
    holes = {**batch, "mask": torch.ones(edges.ROWS, 1).index_fill(0, torch.tensor([1, 5]), 0)}
    model, plain = Masked(), Masked()
    optimizer = edges.optimizer_for(plain)
    step = tutti.parallelize(model, edges.optimizer_for(model), batch, cluster="cpu:2", plan="dp2", level="O0")
    for b in (batch, holes, batch, holes):
        optimizer.zero_grad()
        loss = plain(**b)
        loss.backward()
        optimizer.step()
        assert step(b).item() == pytest.approx(loss.item(), rel=1e-5)
    assert len(step.recaptures) == 1 and "if not mask.all():` gives False, not True" in step.recaptures[0]


def test_static_entries_of_the_batch():
    def loss(model, batch):
        return model(batch["x"] * batch["scale"], batch["y"]) + (1.0 if batch["more"][0] == "one" else 0.0)

    model = edges.Net()
    batch = {**edges.points(), "scale": 2.0, "more": ["one", None]}
    step = tutti.parallelize(model, edges.optimizer_for(model), batch, loss=loss, level="O0")
    expected = [loss(model, b).item() for b in (batch, {**batch, "scale": 3.0}, {**batch, "more": ["two", None]})]
    losses = [step.evaluate(b).item() for b in (batch, {**batch, "scale": 3.0}, {**batch, "more": ["two", None]})]
    assert losses == pytest.approx(expected, rel=1e-6)


def test_values_that_are_always_others_are_an_error_in_the_end():
    class Scaled(edges.Net):
        def forward(self, x, y):
            return super().forward(x / x.abs().max().item(), y)

    model, batch = Scaled(), edges.points()
    step = tutti.parallelize(model, edges.optimizer_for(model), batch, level="O0")
    with pytest.raises(ValueError, match=rf"captured {MOST} times .*x.abs\(\).max\(\).item\(\).* gives .* not"):
        for i in range(MOST + 1):
            step.evaluate({**batch, "x": batch["x"] + i})


def test_a_check_that_fails_is_told_with_its_line():
    class Checked(edges.Net):
        def between(self, x):
            if not torch.isfinite(x).all():
                raise FloatingPointError("activations are not finite")
            return torch.tanh(x)

    for plan, devices, microbatches in PLANS:
        model, batch = Checked(), edges.points()
        step = tutti.parallelize(model, edges.optimizer_for(model), batch, cluster=f"cpu:{devices}", plan=plan,
                                 level="O0", accumulate=microbatches)  # fmt: skip
        step(batch)
        with pytest.raises(CheckFailed, match=r"step 2: .*test_changes\.py:\d+, `if not torch.isfinite\(x\).all\(\):"
                                              r"`: FloatingPointError: activations are not finite"):  # fmt: skip
            step({**batch, "x": batch["x"] / 0})
        with pytest.raises(CheckFailed, match=r"evaluation: .*activations are not finite"):
            step.evaluate({**batch, "x": batch["x"] / 0})


def test_metrics_beside_the_loss():
    def loss(model, batch):
        logits = model.down(torch.tanh(model.up(batch["x"])))
        hits = logits.argmax(1) == batch["y"]
        return F.cross_entropy(logits, batch["y"]), {
            "accuracy": hits.float().mean(),
            "hits": hits.sum(),
            "logits": logits,
        }

    expected = {}
    for plan, devices, microbatches in PLANS:
        model, batch = edges.Net(), edges.points()
        how = {"accuracy": "mean", "hits": "sum", "logits": "gather"}
        step = tutti.parallelize(model, edges.optimizer_for(model), batch, loss=loss, cluster=f"cpu:{devices}",
                                 plan=plan, level="O0", accumulate=microbatches, metrics=how)  # fmt: skip
        step(batch)
        expected = expected or loss(edges.Net(), batch)[1]
        torch.testing.assert_close({k: x.float() for k, x in step.metrics.items()},
                                   {k: x.float() for k, x in expected.items()}, check_device=False)  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_metrics_that_are_constants_in_a_dict(plan):
    name, devices, microbatches = plan

    def loss(model, batch):
        return {"loss": model(**batch), "target": torch.tensor(3.0), "norm": model.up.weight.norm()}

    model, batch = edges.Net(), edges.points()
    norm = model.up.weight.norm().item()
    step = tutti.parallelize(model, edges.optimizer_for(model), batch, loss=loss, cluster=f"cpu:{devices}", plan=name,
                             level="O0", accumulate=microbatches)  # fmt: skip
    step(batch)
    assert step.metrics["target"].item() == 3.0
    assert step.metrics["norm"].item() == pytest.approx(norm, rel=1e-5)


def test_metrics_of_a_models_output():
    import zoo

    model, batch = zoo.llama(1), zoo.tokens(4)
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, cluster="cpu:2", plan="dp2",
                             level="O0", metrics=["logits"])  # fmt: skip
    step(batch)
    torch.testing.assert_close(step.metrics["logits"], model(**batch).logits.detach())
    with pytest.raises(ValueError, match="metric 'nothing' is a NoneType in the output of the model; it has"):
        tutti.capture(model, batch, metrics=["nothing"])
    with pytest.raises(ValueError, match="metric 'logits' is combined by 'max'; it may be mean, sum, gather"):
        tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, metrics={"logits": "max"})


# -- what cannot be captured -----------------------------------------------------------------------------------------


class Counting(edges.Net):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def between(self, x):
        self.calls += 1
        return torch.tanh(x) / self.calls


class Remembering(edges.Net):
    def __init__(self):
        super().__init__()
        self.last = None

    def between(self, x):
        y = torch.tanh(x) if self.last is None else torch.tanh(x) + self.last
        self.last = x.detach().mean(0)
        return y


class Rolling(edges.Net):
    def between(self, x):
        return torch.tanh(x) * (1 if random.random() < 0.5 else 2)


class Drawing(edges.Net):
    def __init__(self):
        super().__init__()
        self.generator = numpy.random.default_rng(3)

    def between(self, x):
        return torch.tanh(x) * float(self.generator.random())


class Replacing(edges.Net):
    def between(self, x):
        self.down.weight.data = self.down.weight.data * 0.9
        return torch.tanh(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Counting(), "depends on Python state that its forward changes: 'calls' was 0 before the call and 1 after"),
        (Remembering(), "depends on Python state that its forward changes: 'last' was None before"),
        (Rolling(), "depends on random numbers that the model draws from random"),
        (Drawing(), "depends on random numbers that the model draws from generator"),
        (Replacing(), "replaces the tensor of parameter 'down.weight'"),
    ],
)
def test_python_state_that_a_graph_cannot_have(model, message):
    state = random.getstate()
    with pytest.raises(ValueError, match=message):
        tutti.capture(model, edges.points())
    assert random.getstate() == state and getattr(model, "calls", 0) == 0 and getattr(model, "last", None) is None


def test_memory_that_two_tensors_share():
    model = edges.Net()
    model.register_buffer("view", model.up.weight.detach()[:2])
    with pytest.raises(ValueError, match=r"buffer:view and param:up.weight are different tensors that share memory"):
        tutti.capture(model, edges.points(), edges.optimizer_for(model))


@pytest.mark.parametrize(
    "plan", [("dp4", 4, 1), ("zero3", 4, 1), ("dp2xtp2", 4, 1), ("zero2", 2, 2), ("single", 1, 3), ("pp2", 2, 2)]
)
def test_a_last_smaller_batch_that_does_not_divide(plan):
    name, devices, microbatches = plan
    theirs, ours = edges.Net(), edges.Net()
    optimizer, batch = edges.optimizer_for(theirs), edges.points()
    step = tutti.parallelize(ours, edges.optimizer_for(ours), batch, cluster=f"cpu:{devices}", plan=name, level="O0",
                             accumulate=microbatches)  # fmt: skip
    for count in (edges.ROWS, 7, edges.ROWS, 5):
        part = {key: x[:count] for key, x in batch.items()}
        optimizer.zero_grad()
        loss = theirs(**part)
        loss.backward()
        optimizer.step()
        assert step(part).item() == pytest.approx(loss.item(), rel=1e-5)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(step.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def in_a_job(plan: str, microbatches: int) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """One rank of four: losses around a change, metrics, and what a failed check says."""
    model, batch = Guarded(), edges.points()
    step = tutti.parallelize(
        model, adam(model), batch, loss=with_metrics, plan=plan, level="O0", accumulate=microbatches
    )
    losses = [step(batch).item(), step(batch).item()]
    model.up.requires_grad_(False)
    losses += [step(batch).item(), step({key: x[:8] for key, x in batch.items()}).item()]
    model.up.requires_grad_(True)
    losses += [step(batch).item(), step(batch).item()]
    metrics = step.metrics
    try:
        step.evaluate({**batch, "x": batch["x"] / 0})
    except CheckFailed as error:
        return losses, metrics, str(error)
    return losses, metrics, ""


class Guarded(edges.Net):
    def between(self, x):
        if torch.isnan(x).any():
            raise FloatingPointError("NaN")
        return torch.tanh(x)


def with_metrics(model, batch):
    logits = model.down(model.between(model.up(batch["x"])))
    return F.cross_entropy(logits, batch["y"]), {"logits": logits, "mean": logits.mean()}


@pytest.mark.parametrize(("plan", "microbatches"), [slow("dp2xtp2", 1), slow("zero3", 1), ("pp2xdp2", 2)])
def test_processes_notice_changes_too(pool, plan, microbatches):
    model, batch = Guarded(), edges.points()
    optimizer, expected = adam(model), []
    for i in range(6):
        model.up.requires_grad_(i not in (2, 3))
        part = {key: x[:8] for key, x in batch.items()} if i == 3 else batch
        optimizer.zero_grad()
        loss, metrics = with_metrics(model, part)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, rank_metrics, said in pool.run(in_a_job, plan, microbatches):
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(rank_metrics, {key: x.detach() for key, x in metrics.items()}, rtol=1e-5, atol=1e-6)
        assert "FloatingPointError: NaN" in said


# -- branches with effects, the backward pass, late and renamed parameters ---------------------------------------------


class Appending(edges.Net):
    def between(self, x):
        parts = [x.sin()]
        if x.max() > 100:
            parts.append(2 * x)
        return sum(parts)


class WritingThroughAView(edges.Net):
    def between(self, x):
        x = x.clone()
        if x.max() > 100:
            x[:, 0].mul_(0)
        return torch.tanh(x)


class ResettingABuffer(edges.Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(edges.WIDTH))

    def reset(self):
        self.mean = torch.zeros(edges.WIDTH)

    def between(self, x):
        if x.max() > 100:
            self.reset()
        return torch.tanh(x) * self.mean


class ClippingInAHook(edges.Net):
    def between(self, x):
        x = torch.tanh(x)
        x.register_hook(lambda g: g * 0.01 / g.norm() if g.norm() > 0.01 else g)
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Appending, "changes Python state"),
        (WritingThroughAView, "writes into a tensor created before the branch"),
        (ResettingABuffer, "changes Python state"),
    ],
)
def test_branches_whose_ways_do_more_than_compute(model, message):
    with pytest.raises(ValueError, match=f"the model branches on the values .*{message}"):
        tutti.capture(model(), edges.points())


def test_a_branch_in_a_hook_is_refused_or_right():
    try:
        graph = tutti.capture(ClippingInAHook(), edges.points())
    except ValueError as error:
        assert "evaluated in the backward pass" in str(error) or "different things" in str(error)
    else:
        raise AssertionError(f"a branch in the backward pass is in no graph: {graph.graph}")


class PrivateNames(edges.Net):
    def __init__(self):
        super().__init__()
        self.__scale = 0.5

    def between(self, x):
        y = super().between(x)
        if torch.isinf(y).any():
            y = y.clamp(-1, 1) * self.__scale
        return y


class LateUse(edges.Net):
    """A layer that is used from the third step on: Adam corrects its first update as a first one."""

    def __init__(self):
        super().__init__()
        self.extra, self.use = nn.Linear(edges.WIDTH, edges.WIDTH), False

    def between(self, x):
        return torch.tanh(self.extra(x) if self.use else x)


@pytest.mark.parametrize("plan", SOME)
def test_a_parameter_that_is_used_late(plan):
    def use(model, optimizer):
        model.use = True

    def leave(model, optimizer):
        model.use = False

    compare([use, leave, use], plan, LateUse)


def test_private_names_and_super_in_a_branch():
    compare([], ("dp2", 2, 1), PrivateNames)


def test_counts_with_accumulated_microbatches():
    compare([lambda model, o: model.up.requires_grad_(False), lambda model, o: model.up.requires_grad_(True)],
            ("dp2", 2, 2))  # fmt: skip


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.003, 0.003)


class ClampedGradients(edges.Net):
    def between(self, x):
        x = Clamped.apply(x)
        x.register_hook(lambda g: g.clamp(-0.002, 0.002))
        return torch.tanh(x)


@pytest.mark.parametrize("plan", [("single", 1, 2), ("pp2", 2, 2)])
def test_a_backward_pass_that_is_not_linear_sees_gradients_of_the_mean(plan):
    compare([], plan, ClampedGradients, edges.optimizer_for)


def test_modules_that_are_inserted_wrapped_and_replaced():
    class Deep(edges.Net):
        def __init__(self):
            super().__init__()
            self.stack = nn.Sequential(nn.Linear(edges.WIDTH, edges.WIDTH), nn.BatchNorm1d(edges.WIDTH))

        def between(self, x):
            return self.stack(torch.tanh(x))

    def insert(model, optimizer):
        torch.manual_seed(7)
        model.stack.insert(0, nn.Linear(edges.WIDTH, edges.WIDTH))
        optimizer.add_param_group({"params": list(model.stack[0].parameters())})

    def replace(model, optimizer):
        model.stack[2] = nn.BatchNorm1d(edges.WIDTH, affine=False)
        left = {id(p) for p in model.stack[0].parameters()}
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if id(p) not in left]

    def wrap(model, optimizer):
        model.up = nn.Sequential(model.up)

    compare([insert, replace, wrap], ("dp2", 2, 1), Deep, edges.optimizer_for)


def test_values_of_attributes_that_are_told_apart_by_identity():
    class Shifted(edges.Net):
        def __init__(self):
            super().__init__()
            self.shift = None

        def between(self, x):
            return torch.tanh(x if self.shift is None else x + self.shift)

    def shifted(k):
        def change(model, optimizer):
            model.shift = torch.full((edges.WIDTH,), float(k))

        return change

    compare([shifted(k) for k in (1, 2, 1, 5, 2, 7)], ("single", 1, 1), Shifted)


@pytest.mark.filterwarnings("ignore:no rule says how to split")
def test_a_batch_that_forward_writes_into():
    class Writing(edges.Net):
        def forward(self, x, y):
            x.mul_(0.5)
            return super().forward(x, y.clamp_(max=2))

    model, plain = Writing(), Writing()
    copies = [edges.points() for _ in range(2)]
    step = tutti.parallelize(model, edges.optimizer_for(model), copies[0], cluster="cpu:2", plan="dp2", level="O0")
    assert step(copies[0]).item() == pytest.approx(plain(**copies[1]).item(), rel=1e-5)


SETTINGS = {"beta": 1.0, "terms": [1.0]}
GAMMA = 1.0


class Scaled(Net):
    factor = 1.0

    def between(self, x):
        return super().between(x) * self.factor * GAMMA


class Weighted:
    def __init__(self):
        self.weight = 1.0

    def __call__(self, model, batch):
        return model(**batch) * self.weight

    def method(self, model, batch):
        return self(model, batch)


@pytest.mark.starts
def test_python_state_outside_of_the_model_is_noticed():
    """Class attributes, global variables, closures, and attributes of a criterion and of a callable loss."""
    criterion, weighted, share = nn.SmoothL1Loss(), Weighted(), 1.0

    def loss(model, batch):
        value = weighted.method(model, batch) * SETTINGS["beta"] * SETTINGS["terms"][0] * share
        return value + criterion(value, torch.ones(()))

    def changes():
        nonlocal share
        yield lambda: SETTINGS.update(beta=0.5)
        yield lambda: SETTINGS["terms"].__setitem__(0, 0.25)
        yield lambda: globals().update(GAMMA=2.0)
        yield lambda: setattr(Scaled, "factor", 3.0)
        yield lambda: setattr(criterion, "beta", 0.1)
        yield lambda: setattr(weighted, "weight", 2.0)
        share = 0.3
        yield lambda: None

    models = [Scaled(), Scaled()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [adam(model) for model in models]
    batch = edges.points()
    step = tutti.parallelize(models[0], optimizers[0], batch, loss=loss, cluster="cpu:1", plan="single")
    try:
        for change in changes():
            change()
            for _ in range(2):
                optimizers[1].zero_grad()
                expected = loss(models[1], batch)
                expected.backward()
                optimizers[1].step()
                torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-5, atol=1e-6)
    finally:
        SETTINGS.update(beta=1.0, terms=[1.0])
        globals().update(GAMMA=1.0)
        Scaled.factor = 1.0
    assert len(step.recaptures) == 7


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.starts
def test_attributes_of_a_loss_object_are_noticed(bound):
    weighted, model = Weighted(), Net()
    loss = weighted.method if bound else weighted
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.0), edges.points(), loss=loss)
    before = step(edges.points())
    weighted.weight = 3.0
    torch.testing.assert_close(step(edges.points()), 3 * before)


@functools.lru_cache
def projection(width):
    return torch.randn(width)


class Projected(Net):
    def between(self, x):
        return super().between(x) * projection(edges.WIDTH)


class Frozen(Net):
    @functools.lru_cache(maxsize=1)  # noqa: B019
    def first(self):
        return self.up.weight.detach().sum()

    def between(self, x):
        return super().between(x) * self.first()


@pytest.mark.parametrize("make", [Projected, Frozen])
def test_caches_of_what_a_step_would_make_otherwise_are_refused(make):
    """Random numbers, or values of parameters, that the first call draws or reads for good."""
    projection.cache_clear()
    model = make()
    with pytest.raises(ValueError, match="depends on Python state that its forward changes"):
        tutti.capture(model, edges.points(), adam(model))
    cached = projection(edges.WIDTH)
    if make is Projected:
        tutti.capture(model, edges.points(), adam(model))  # where they are there they are constants
        assert projection(edges.WIDTH) is cached


class Holder:
    """A namespace of a user's file, held by a global variable."""

    def __init__(self):
        self.tables, self.calls, self.scale = {}, 0, 1.0


HOLDER = Holder()
NESTED: dict = {"rope": {}}


class UsingAHolder(edges.Net):
    counts = False

    def between(self, x):
        if "table" not in HOLDER.tables:
            HOLDER.tables["table"] = torch.linspace(0.5, 1.5, edges.WIDTH)
        if edges.WIDTH not in NESTED["rope"]:
            NESTED["rope"][edges.WIDTH] = torch.ones(edges.WIDTH) / 2
        HOLDER.calls += 1
        x = super().between(x) * HOLDER.tables["table"] * NESTED["rope"][edges.WIDTH] * HOLDER.scale
        return x * HOLDER.calls if self.counts else x


def test_objects_in_global_variables_are_as_before_capture(_holder):
    model, batch = UsingAHolder(), edges.points()
    step = tutti.parallelize(model, adam(model), batch, cluster="cpu:2", plan="dp2")
    assert not HOLDER.tables and not NESTED["rope"] and not HOLDER.calls
    twin = UsingAHolder()
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(step.evaluate(batch), twin(**batch), rtol=1e-5, atol=1e-6)
    HOLDER.scale = 3.0
    torch.testing.assert_close(step.evaluate(batch), twin(**batch), rtol=1e-5, atol=1e-6)


def test_counters_in_global_objects_are_refused(_holder):
    model = UsingAHolder()
    model.counts = True
    with pytest.raises(ValueError, match=r"HOLDER\.calls"):
        tutti.parallelize(model, adam(model), edges.points(), cluster="cpu:2", plan="dp2")
    assert not HOLDER.tables and not HOLDER.calls


@pytest.fixture
def _holder():
    yield
    HOLDER.__init__()
    NESTED["rope"].clear()
