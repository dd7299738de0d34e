"""The model and the optimizer are the user's and live: training code that reads and writes them between steps is right.

Each case is ordinary training code, with steps given by `make_step`: plain PyTorch's, or those of `tutti.parallelize`
under a plan. Losses, the values that it reads in between and the final state are equal.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tutti

ROWS, WIDTH = 12, 8
STEPS = 3
PLANS = {"single": 1, "dp2": 2, "tp2": 2, "zero3": 2, "dp2xtp2": 4, "pp2": 2, "auto": 2, "random": 4}
Make = Callable[..., Callable[[Any], torch.Tensor]]  # (model, optimizer, batch, loss) -> step


def mlp(seed: int, features: int = WIDTH, outputs: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))


def adam(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-4)


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.sin(x)


def fit(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def summary(model: nn.Module) -> list[float]:
    return [p.detach().double().square().sum().item() for p in model.parameters()]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Callable) -> Callable:
    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def under(plan: str, cluster: str | None = None) -> Make:
    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Callable) -> Callable:
        where, chosen = cluster or f"cpu:{PLANS[plan]}", plan
        if plan == "random":  # drawn from all that the rules allow
            graph = tutti.capture(model, batch, optimizer, loss)
            chosen = tutti.random_plan(graph, PLANS[plan], seed=len(loss.__name__))
        return tutti.parallelize(model, optimizer, batch, loss=loss, plan=chosen, cluster=where, level="O0")

    return make_step


# -- cases: each returns numbers -------------------------------------------------------------------------------------


def gan(make_step: Make) -> list[float]:
    """Each of two steps reads what the other one trains."""
    generator, critic = mlp(0), mlp(1, outputs=1)
    first, second = adam(generator), adam(critic)

    def fool(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.softplus(-model["critic"](model["generator"](batch[0]))).mean()

    def tell(model: nn.Module, batch: Any) -> torch.Tensor:
        fake = model["generator"](batch[0]).detach()
        return (F.softplus(model["critic"](fake)) + F.softplus(-model["critic"](batch[1]))).mean()

    both = nn.ModuleDict({"generator": generator, "critic": critic})
    batch, numbers = batch_of(0), []
    steps = []
    for trained, optimizer, loss in ((critic, second, tell), (generator, first, fool)):
        for part in (generator, critic):
            part.requires_grad_(part is trained)
        steps.append((trained, make_step(both, optimizer, batch, loss)))
    for i in range(STEPS):
        for trained, step in steps:
            for part in (generator, critic):
                part.requires_grad_(part is trained)
            numbers.append(step(batch_of(i)).item())
    return numbers + summary(generator) + summary(critic)


def mean_teacher(make_step: Make) -> list[float]:
    """The teacher is an average that the loop keeps with `lerp_`; the loss reads it."""
    student, teacher = mlp(0), mlp(0).requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model["student"](batch[0])
        return F.mse_loss(outputs, batch[1]) + F.mse_loss(outputs, model["teacher"](batch[0] + 0.1).detach())

    both, batch, numbers = nn.ModuleDict({"student": student, "teacher": teacher}), batch_of(0), []
    step = make_step(both, adam(student), batch, loss)
    for i in range(STEPS):
        numbers.append(step(batch_of(i)).item())
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
    return numbers + summary(teacher)


def moco(make_step: Make) -> list[float]:
    """A momentum encoder outside of the step computes the keys."""
    query, key, numbers = mlp(0), mlp(0).requires_grad_(False), []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        q, k = F.normalize(model(batch[0]), dim=-1), F.normalize(batch[1], dim=-1)
        return F.cross_entropy(q @ k.T / 0.2, torch.arange(len(q)))

    step = make_step(query, adam(query), batch_of(0), loss)
    for i in range(STEPS):
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            x = batch_of(i)[0]
            keys = key(x)
        numbers.append(step((x, keys)).item())
    return numbers + summary(key)


def averaged(make_step: Make) -> list[float]:
    """torch's averages of weights, evaluated on the way."""
    model, numbers = mlp(0), []
    step, average = make_step(model, adam(model), batch_of(0), fit), AveragedModel(model)
    for i in range(STEPS):
        step(batch_of(i))
        average.update_parameters(model)
        numbers.append(fit(average, batch_of(9)).item())
    return numbers


def alternating(make_step: Make) -> list[float]:
    """Two optimizers take turns on the halves of one model."""
    model, numbers = mlp(0), []
    halves = [list(model[:2].parameters()), list(model[2:].parameters())]
    optimizers = [torch.optim.AdamW(halves[0], lr=0.02, eps=1e-4), torch.optim.SGD(halves[1], lr=0.1, momentum=0.9)]
    steps = []
    for i, optimizer in enumerate(optimizers):
        for j, half in enumerate(halves):
            for p in half:
                p.requires_grad_(i == j)
        steps.append(make_step(model, optimizer, batch_of(0), fit))
    for i in range(2 * STEPS):
        for j, half in enumerate(halves):
            for p in half:
                p.requires_grad_(i % 2 == j)
        numbers.append(steps[i % 2](batch_of(i)).item())
    return numbers + summary(model)


def callback(make_step: Make) -> list[float]:
    """Evaluation, norms of weights and early stopping between steps."""
    model, numbers = mlp(0), []
    step = make_step(model, adam(model), batch_of(0), fit)
    best, best_state = float("inf"), {}
    for i in range(STEPS):
        step(batch_of(i))
        with torch.no_grad():
            value = fit(model, batch_of(9)).item()
        if value < best:
            best, best_state = value, {name: x.clone() for name, x in model.state_dict().items()}
        numbers += [value, model[0].weight.norm().item(), float(model[2].bias.detach().abs().max())]
    model.load_state_dict(best_state)
    return [*numbers, step(batch_of(5)).item(), *summary(model)]


def copied(make_step: Make) -> list[float]:
    """A copy in the middle of training stays as it is."""
    model = mlp(0)
    optimizer = adam(model)
    step = make_step(model, optimizer, batch_of(0), fit)
    step(batch_of(0))
    other = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    step(batch_of(1))
    assert type(next(other.parameters())) is nn.Parameter
    restored = adam(other)
    restored.load_state_dict(state)
    plain(other, restored, None, fit)(batch_of(1))
    return summary(other) + summary(model)


def saved(make_step: Make) -> list[float]:
    """`torch.save` of both, resumed in plain PyTorch, and back."""
    model = mlp(0)
    optimizer = adam(model)
    step, file = make_step(model, optimizer, batch_of(0), fit), io.BytesIO()
    for i in range(STEPS):
        step(batch_of(i))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = mlp(5)
    theirs = adam(other)
    other.load_state_dict(state["model"]), theirs.load_state_dict(state["optimizer"])
    losses = [plain(other, theirs, None, fit)(batch_of(i)).item() for i in range(2)]
    losses += [step(batch_of(i)).item() for i in range(2)]
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    losses += [step(batch_of(i)).item() for i in range(2)]
    return losses + summary(model)


def resumed_before_the_first_step(make_step: Make) -> list[float]:
    """A state is loaded into model and optimizer after the step was made."""
    model = mlp(0)
    optimizer = adam(model)
    step = make_step(model, optimizer, batch_of(0), fit)
    for i in range(STEPS):
        step(batch_of(i))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = mlp(5)
    theirs = adam(other)
    again = make_step(other, theirs, batch_of(0), fit)
    other.load_state_dict(state[0]), theirs.load_state_dict(state[1])
    return [again(batch_of(i)).item() for i in range(2)] + summary(other)


def plain_steps_between(make_step: Make) -> list[float]:
    """Steps of PyTorch itself, on the same model and optimizer."""
    model, numbers = mlp(0), []
    optimizer = adam(model)
    step, theirs = make_step(model, optimizer, batch_of(0), fit), plain(model, optimizer, None, fit)
    for i in range(STEPS):
        numbers += [step(batch_of(i)).item(), theirs(batch_of(i)).item()]
    return numbers + summary(model)


def freezing(make_step: Make) -> list[float]:
    """Layers are frozen, trained again, and scaled meanwhile."""
    model, numbers = mlp(0), []
    step = make_step(model, adam(model), batch_of(0), fit)
    for frozen in (False, True, True, False):
        model[2].requires_grad_(not frozen)
        if frozen:
            with torch.no_grad():
                model[2].weight.mul_(0.9)
        model.zero_grad()
        numbers.append(step(batch_of(0)).item())
    return numbers + summary(model)


def merged(make_step: Make) -> list[float]:
    """Low-rank factors are merged into the weight in the middle of training, and begin again at zero."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, False), nn.Linear(2, WIDTH, False)
            nn.init.zeros_(self.b.weight)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    model, numbers = Adapted(), []
    optimizer = adam(model)
    step = make_step(model, optimizer, batch_of(0), fit)
    for i in range(2 * STEPS):
        if i == STEPS:
            with torch.no_grad():
                model.base.weight += model.b.weight @ model.a.weight
                nn.init.zeros_(model.b.weight)
            optimizer.state.clear()
        numbers.append(step(batch_of(i)).item())
    return numbers + summary(model)


def written_data(make_step: Make) -> list[float]:
    """Writes that torch does not count: through `.data`, by another tensor, and into the optimizer's state."""
    model, numbers = mlp(0), []
    optimizer = adam(model)
    step = make_step(model, optimizer, batch_of(0), fit)
    for i in range(STEPS):
        numbers.append(step(batch_of(i)).item())
        model[0].weight.data.mul_(0.9)
        model[2].bias.data = torch.full_like(model[2].bias.data, 0.1)
        optimizer.state[model[4].weight]["exp_avg"].zero_()
    return numbers + summary(model)


def weight_tying(make_step: Make) -> list[float]:
    """A parameter is tied to another one after some steps, and the optimizer no longer has it."""
    torch.manual_seed(0)
    model, numbers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), []
    optimizer = adam(model)
    step = make_step(model, optimizer, batch_of(0), fit)
    for i in range(2 * STEPS):
        if i == STEPS:
            model[2].weight = model[0].weight
            optimizer.param_groups[0]["params"] = list(model.parameters())
        numbers.append(step(batch_of(i)).item())
    return numbers + summary(model)


def running_statistics(make_step: Make) -> list[float]:
    """Buffers that forward changes are the model's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, WIDTH))
    numbers, step = [], None
    step = make_step(model, adam(model), batch_of(0), fit)
    for i in range(STEPS):
        step(batch_of(i))
        numbers += [model[1].running_mean.sum().item(), float(model[1].num_batches_tracked)]
    model[1].reset_running_stats()
    step(batch_of(5))
    return [*numbers, model[1].running_var.sum().item()]


def stale_graph(make_step: Make) -> list[float]:
    """A graph from before a step cannot be used after it: torch says so."""
    model = mlp(0)
    step = make_step(model, adam(model), batch_of(0), fit)
    step(batch_of(0))
    value = fit(model, batch_of(1))
    step(batch_of(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    return [step(batch_of(2)).item()]


CASES = (
    gan, mean_teacher, moco, averaged, alternating, callback, copied, saved,
    resumed_before_the_first_step, plain_steps_between, freezing, merged,
    written_data, weight_tying, running_statistics, stale_graph,
)  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_in_plain_pytorch(case, plan):
    assert case(under(plan)) == pytest.approx(case(plain), rel=1e-4, abs=1e-6)


def on_ranks(names: list[str], plan: str) -> list[list[float]]:
    return [next(case for case in CASES if case.__name__ == name)(under(plan, "auto")) for name in names]


@pytest.mark.parametrize("plan", ["dp4", "dp2xtp2", "zero3", "pp2xdp2"])
def test_processes(pool, plan):
    """On four Gloo ranks, of which each has its own model."""
    names = [case.__name__ for case in CASES]
    for per_case in pool.run(on_ranks, names, plan):
        for case, numbers in zip(CASES, per_case, strict=True):
            assert numbers == pytest.approx(case(plain), rel=1e-4, abs=1e-6), case.__name__


@pytest.mark.parametrize("plan", ["single", "zero3"])
def test_a_checkpoint_wins_over_what_was_written_before(plan, tmp_path):
    model = mlp(0)
    optimizer = adam(model)
    step = under(plan)(model, optimizer, batch_of(0), fit)
    step(batch_of(0))
    step.save(checkpoints := tutti.Checkpoints(tmp_path))
    checkpoints.wait()
    state, weight = step.training_state(), model[0].weight.detach().clone()
    for load in (lambda: step.load(checkpoints.latest()), lambda: step.load_training_state(state)):
        step(batch_of(1))
        model[0].weight.data = torch.ones_like(model[0].weight.data)
        optimizer.state.clear()
        load()
        assert torch.equal(model[0].weight.detach(), weight)
        now = step.training_state()
        assert all(torch.equal(now[name], x) for name, x in state.items())
