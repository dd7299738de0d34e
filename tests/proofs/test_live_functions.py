"""The objects of a store are the user's and live: code that reads and writes them between calls of functions is right.

Each case is ordinary code, with functions given by `lift`: plain Python, or `tutti.function` over one store under a
plan. Losses, the values that it reads in between and the final state are equal.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_live_model import PLANS, ROWS, STEPS, WIDTH, adam, batch_of, fit, mlp, plain, summary
from torch import Tensor, nn

import tutti

Lift = Callable[..., Callable]  # (objects) -> (function, *example arguments) -> the function


def in_pytorch(**objects: Any) -> Callable:
    return lambda f, *example: f


def under(plan: str, cluster: str | None = None) -> Lift:
    def over_store(**objects: Any) -> Callable:
        store, where = tutti.Store(**objects), cluster or f"cpu:{PLANS[plan]}"

        def lifted(f: Callable, *example: Any) -> Callable:
            chosen = plan
            if plan == "random":  # drawn from all that the rules allow
                chosen = tutti.random_plan(store.capture(f, example, {}).graph, PLANS[plan], seed=1)
            return tutti.function(f, *example, store=store, plan=chosen, cluster=where)

        return lifted

    return over_store


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def evaluation(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    @torch.no_grad()
    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    return evaluate


# -- cases: each returns numbers -------------------------------------------------------------------------------------


def gan(lift: Lift) -> list[float]:
    """Two optimizers in one function; samples between calls are those of the trained generator."""
    generator, critic = mlp(0), mlp(1, outputs=1)
    first, second = adam(generator), adam(critic)

    def update(noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = generator(noise)
        second.zero_grad()
        tell = (F.softplus(critic(fake.detach())) + F.softplus(-critic(real))).mean()
        tell.backward()
        second.step()
        first.zero_grad()
        fool = F.softplus(-critic(fake)).mean()
        fool.backward()
        first.step()
        return tell.detach(), fool.detach()

    step = lift(generator=generator, critic=critic, first=first, second=second)(update, *batch_of(0))
    numbers = []
    for i in range(STEPS):
        numbers += map(float, step(*batch_of(i)))
        with torch.no_grad():
            numbers.append(generator(batch_of(9)[0]).square().mean().item())
        if i == 0:
            with torch.no_grad():
                critic[0].weight.clamp_(-0.2, 0.2)
    return numbers + summary(generator) + summary(critic)


def teacher_inside(lift: Lift) -> list[float]:
    """The function keeps an average of the weights, which the loop evaluates and once sets back."""
    student, teacher, numbers = mlp(0), mlp(0).requires_grad_(False), []
    optimizer = adam(student)

    def update(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(student(x), y) + F.mse_loss(student(x), teacher(x + 0.1))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
        return loss.detach()

    step = lift(student=student, teacher=teacher, optimizer=optimizer)(update, *batch_of(0))
    for i in range(STEPS):
        numbers += [step(*batch_of(i)).item(), fit(teacher, batch_of(9)).item()]
        if i == 1:
            teacher.load_state_dict(student.state_dict())
    return numbers + summary(teacher)


def teacher_outside(lift: Lift) -> list[float]:
    """The loop keeps the average, and the function reads it."""
    student, teacher, numbers = mlp(0), mlp(0).requires_grad_(False), []
    optimizer = adam(student)

    def update(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        outputs = student(x)
        loss = F.mse_loss(outputs, y) + F.mse_loss(outputs, teacher(x + 0.1).detach())
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = lift(student=student, teacher=teacher, optimizer=optimizer)(update, *batch_of(0))
    for i in range(STEPS):
        numbers.append(step(*batch_of(i)).item())
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
    return numbers + summary(teacher)


def beside_plain_steps(lift: Lift) -> list[float]:
    """A function that trains, one that evaluates, and steps of PyTorch itself."""
    model, numbers = mlp(0), []
    optimizer = adam(model)
    lifted, theirs = lift(model=model, optimizer=optimizer), plain(model, optimizer, None, fit)
    train, evaluate = lifted(training(model, optimizer), *batch_of(0)), lifted(evaluation(model), *batch_of(0))
    for i in range(STEPS):
        numbers += [train(*batch_of(i)).item(), evaluate(*batch_of(9)).item()]
        numbers += [theirs(batch_of(i)).item(), evaluate(*batch_of(9)).item()]
    return numbers + summary(model)


def saved(lift: Lift) -> list[float]:
    """`torch.save`, resumed in plain PyTorch, and by a function before its first call and after."""
    model, file = mlp(0), io.BytesIO()
    optimizer = adam(model)
    train = lift(model=model, optimizer=optimizer)(training(model, optimizer), *batch_of(0))
    for i in range(STEPS):
        train(*batch_of(i))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    numbers = []
    for lifts in (in_pytorch, lift):
        other = mlp(5)
        theirs = adam(other)
        resumed = lifts(model=other, optimizer=theirs)(training(other, theirs), *batch_of(0))
        other.load_state_dict(state["model"]), theirs.load_state_dict(copy.deepcopy(state["optimizer"]))
        numbers += [resumed(*batch_of(i)).item() for i in range(2)]
    numbers += [train(*batch_of(i)).item() for i in range(2)]
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    return numbers + [train(*batch_of(i)).item() for i in range(2)] + summary(model)


def freezing(lift: Lift) -> list[float]:
    """Layers are frozen, trained again, and scaled meanwhile; one is frozen at first."""
    model, numbers = mlp(0), []
    optimizer = adam(model)
    model[4].requires_grad_(False)
    train = lift(model=model, optimizer=optimizer)(training(model, optimizer), *batch_of(0))
    for frozen in (False, True, True, False):
        model[2].requires_grad_(not frozen)
        model[4].requires_grad_(frozen)
        if frozen:
            with torch.no_grad():
                model[2].weight.mul_(0.9)
        model.zero_grad()
        numbers.append(train(*batch_of(0)).item())
    return numbers + summary(model)


def written_data(lift: Lift) -> list[float]:
    """Writes that torch does not count: through `.data`, by another tensor, and into the optimizer's state."""
    model, numbers = mlp(0), []
    optimizer = adam(model)
    train = lift(model=model, optimizer=optimizer)(training(model, optimizer), *batch_of(0))
    for i in range(STEPS):
        numbers.append(train(*batch_of(i)).item())
        model[0].weight.data.mul_(0.9)
        model[2].bias.data = torch.full_like(model[2].bias.data, 0.1)
        optimizer.state[model[4].weight]["exp_avg"].zero_()
    optimizer.state.clear()
    return [*numbers, train(*batch_of(0)).item(), *summary(model)]


def replaced_parameters(lift: Lift) -> list[float]:
    """A layer begins anew, with another width in the end; the optimizer is told."""
    model, numbers = mlp(0), []
    optimizer = adam(model)
    train = lift(model=model, optimizer=optimizer)(training(model, optimizer), *batch_of(0))
    for i in range(3):
        numbers.append(train(*batch_of(i)).item())
        torch.manual_seed(7 + i)
        width = 16 if i < 2 else 24
        model[2], model[4] = nn.Linear(16, width), nn.Linear(width, WIDTH)
        optimizer.param_groups[0]["params"] = list(model.parameters())
    return [*numbers, *[train(*batch_of(i)).item() for i in range(2)], *summary(model)]


def converted(lift: Lift) -> list[float]:
    """The model is converted to another dtype between calls."""
    model, numbers = mlp(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = lift(model=model, optimizer=optimizer)(training(model, optimizer), *batch_of(0))
    numbers.append(train(*batch_of(0)).item())
    model.double()
    numbers += [train(*(x.double() for x in batch_of(i))).item() for i in range(2)]
    assert model[0].weight.dtype is torch.float64
    return numbers + summary(model)


def caches(lift: Lift) -> list[float]:
    """Tensors of plain objects: written by the function and by the loop, in place and by others."""
    seen, numbers, model = {"rows": torch.zeros(ROWS, WIDTH), "mean": torch.zeros(WIDTH)}, [], mlp(0)

    @torch.no_grad()
    def note(x: Tensor) -> Tensor:
        seen["rows"].add_(model(x))
        seen["mean"] = seen["mean"].lerp(x.mean(0), 0.5)
        return (seen["rows"] * seen["mean"]).sum()

    fn = lift(seen=seen, model=model)(note, batch_of(0)[0])
    for i in range(2 * STEPS):
        numbers += [fn(batch_of(i)[0]).item(), seen["rows"].norm().item(), seen["mean"].sum().item()]
        if i == 1:
            seen["rows"][3:] = 0
            seen["mean"].mul_(2)
        if i == 3:
            seen["rows"], seen["mean"] = torch.ones(ROWS, WIDTH), torch.ones(WIDTH)
    return [*numbers, seen["rows"].sum().item()]


def running_statistics(lift: Lift) -> list[float]:
    """Buffers that forward changes, and plain attributes that it replaces, are the model's."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.center = torch.zeros(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.center = self.center.lerp(x.detach().mean(0), 0.5)
            return x - self.center

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Centered(), nn.Linear(WIDTH, WIDTH))
    optimizer, numbers = adam(model), []
    train = lift(model=model, optimizer=optimizer)(training(model, optimizer), *batch_of(0))
    for i in range(STEPS):
        train(*batch_of(i))
        numbers += [x.sum().item() for x in (*model[1].buffers(), model[2].center)]
    model[1].reset_running_stats()
    model[2].center = torch.ones(WIDTH)
    return [*numbers, train(*batch_of(5)).item(), model[1].running_var.sum().item(), model[2].center.sum().item()]


def two_stores(lift: Lift) -> list[float]:
    """Two stores over one model: each trains what the other has trained."""
    model, numbers = mlp(0), []
    optimizers = [adam(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    steps = [lift(model=model, optimizer=x)(training(model, x), *batch_of(0)) for x in optimizers]
    for i in range(2 * STEPS):
        numbers.append(steps[i % 2](*batch_of(i)).item())
    return numbers + summary(model)


def copied(lift: Lift) -> list[float]:
    """A copy in the middle of training stays as it is, and a stale graph says so."""
    model = mlp(0)
    optimizer = adam(model)
    train = lift(model=model, optimizer=optimizer)(training(model, optimizer), *batch_of(0))
    train(*batch_of(0))
    other, value = copy.deepcopy(model), fit(model, batch_of(1))
    train(*batch_of(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    assert type(next(other.parameters())) is nn.Parameter
    return summary(other) + summary(model)


CASES = (
    gan, teacher_inside, teacher_outside, beside_plain_steps, saved, freezing, written_data, replaced_parameters,
    converted, caches, running_statistics, two_stores, copied,
)  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_in_plain_pytorch(case, plan):
    assert case(under(plan)) == pytest.approx(case(in_pytorch), rel=1e-4, abs=1e-6)


def on_ranks(names: list[str], plan: str) -> list[list[float]]:
    return [next(case for case in CASES if case.__name__ == name)(under(plan, "auto")) for name in names]


@pytest.mark.parametrize("plan", ["dp4", "tp4", "zero3", "pp2xdp2"])
def test_processes(pool, plan):
    """On four Gloo ranks, of which each has its own objects."""
    names = [case.__name__ for case in CASES]
    for per_case in pool.run(on_ranks, names, plan):
        for case, numbers in zip(CASES, per_case, strict=True):
            assert numbers == pytest.approx(case(in_pytorch), rel=1e-4, abs=1e-6), case.__name__


@pytest.mark.parametrize(("here", "there"), [("dp4", "zero3"), ("zero3", "tp4")])
def test_between_layouts(here, there):
    """What is written takes part in a move, and tensors that are whole again are the user's own memory."""
    model = mlp(0)
    optimizer, other = adam(model), mlp(0)
    store, where = tutti.Store(model=model, optimizer=optimizer), {"cluster": "cpu:4"}
    train = tutti.function(training(model, optimizer), *batch_of(0), store=store, plan=here, **where)
    evaluate = tutti.function(evaluation(model), *batch_of(0), store=store, plan=there, **where)
    theirs = adam(other)
    plain_train, plain_evaluate = training(other, theirs), evaluation(other)
    home, away = train.plan, evaluate.best_plan()
    for i in range(STEPS):
        assert train(*batch_of(i)).item() == pytest.approx(plain_train(*batch_of(i)).item(), rel=1e-4)
        for m in (model, other):
            with torch.no_grad():
                m[2].weight.mul_(0.9)
        store.relayout(away)
        assert evaluate(*batch_of(9)).item() == pytest.approx(plain_evaluate(*batch_of(9)).item(), rel=1e-4)
        for m in (model, other):
            with torch.no_grad():
                m[4].bias.fill_(0.1)
        store.relayout(home)
    assert summary(model) == pytest.approx(summary(other), rel=1e-4)


def shared_before_and_after(x: Tensor, y: Tensor) -> tuple[list[int], bool]:
    """On a rank: how many tensors are shared under dp4, zero3, dp4, and whether they are the memory of the store."""
    model, twin = mlp(0), mlp(0)
    store = tutti.Store(model=model)
    home = tutti.function(evaluation(model), x, y, store=store, plan="dp4").plan
    away = tutti.function(evaluation(twin), x, y, store=tutti.Store(model=twin), plan="zero3").plan
    counts, wanted = [len(store.shared)], summary(model)
    for plan in (away, home):
        store.relayout(plan)
        counts.append(len(store.shared))
    own = all(p.data_ptr() == store.parts[0][f"param:model.{name}"].data_ptr() for name, p in model.named_parameters())
    return counts, own and summary(model) == wanted


def test_what_a_rank_has_whole_again_is_shared_again(pool):
    assert pool.run(shared_before_and_after, *batch_of(0)) == [([6, 0, 6], True)] * 4


def test_a_store_shares_memory():
    model, x = mlp(0), batch_of(0)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    store = tutti.Store(model=model, optimizer=adam(model))
    optimizer = store.holdings.objects["optimizer"]
    train = tutti.function(training(model, optimizer), *x, store=store, cluster="cpu:1")
    train(*x)
    assert {name: store.parts[0][f"param:model.{name}"].data_ptr() for name in addresses} == addresses
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert state.data_ptr() == store.parts[0]["exp_avg:model.0.weight"].data_ptr()


def test_a_store_with_copies_leaves_the_objects_as_they_are():
    model, x = mlp(0), batch_of(0)
    optimizer, before = adam(model), summary(model)
    store = tutti.Store(model=model, optimizer=optimizer, live=False)
    train = tutti.function(training(model, optimizer), *x, store=store, cluster="cpu:2", plan="zero3")
    first, second = train(*x), train(*x)
    assert second < first and summary(model) == before and not optimizer.state


@pytest.mark.parametrize(("kind", "wanted"), [(torch.optim.SGD, [2, 2, 2]), (torch.optim.AdamW, [3, 3, 2])])
def test_a_function_is_captured_again_only_for_what_changes_it(kind, wanted):
    """For a frozen layer, and once when parameters have been updated unequally often; not for values or other calls."""
    model, x = mlp(0), batch_of(0)
    optimizer = kind(model.parameters(), lr=0.01)
    lifted = under("dp2")(model=model, optimizer=optimizer)

    def half(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model[2:](model[:2](x).detach()), y).backward()
        optimizer.step()

    train, rest, evaluate = (lifted(f, *x) for f in (training(model, optimizer), half, evaluation(model)))
    for i in range(4):
        train(*x), rest(*x), evaluate(*x)
        model[4].requires_grad_(i % 2 == 1)
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        optimizer.load_state_dict(optimizer.state_dict())
    assert [sum(map(len, fn._executables.values())) for fn in (train, rest, evaluate)] == wanted
