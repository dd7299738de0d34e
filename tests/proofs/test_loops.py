"""Scans, loops and branches are operators with a sub-graph, which plans split; numbers are those of plain loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import edges
import tutti

PLANS = {"single": 1, "dp2": 2, "tp2": 2, "zero3": 2, "dp2xtp2": 4, "pp2": 2, "random": 4}
TIME, ROWS, WIDTH = 6, 8, 4


class Recurrent(nn.Module):
    """A recurrent cell between two layers; the carry is read in the end, and the outputs of all steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.cell, self.down = nn.Linear(3, WIDTH), nn.GRUCell(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 3)

    def forward(self, x, y):
        last, all_of_them = self.scanned(self.up(x).transpose(0, 1), x.new_zeros(len(x), 2 * WIDTH))
        return F.cross_entropy(self.down(last + all_of_them.mean(0)), y)

    def scanned(self, xs, h):
        def step(h, x):
            h = self.cell(x, h)
            return h, h.tanh()

        return tutti.scan(step, h, xs)


class Backwards(Recurrent):
    """From the last step on, with a counter and a dict in the carry, and a value that gradients do not pass."""

    def scanned(self, xs, h):
        decay = torch.linspace(0.5, 1.0, 2 * WIDTH)

        def step(carry, x):
            with torch.no_grad():
                baseline = carry["h"].mean()
            h = self.cell(x["x"], carry["h"] * decay) - baseline - carry["h"].detach().mean(0)
            return {"h": h, "n": carry["n"] + 1}, (h * x["weight"]).sin() / carry["n"]

        xs = {"x": xs, "weight": torch.arange(1.0, 1.0 + len(xs))}
        carry, ys = tutti.scan(step, {"h": h, "n": torch.ones((), dtype=torch.int64)}, xs, reverse=True)
        return carry["h"], ys


class Nested(Recurrent):
    """Chunks of steps, of which the backward pass keeps one carry each."""

    def scanned(self, xs, h):
        def chunk(h, xs):
            return tutti.scan(lambda h, x: ((h := self.cell(x, h)), h.tanh()), h, xs)

        h, ys = tutti.scan(chunk, h, xs.unflatten(0, (2, TIME // 2)))
        return h, ys.flatten(0, 1)


class Branching(Recurrent):
    """A branch of each step, by the step's number."""

    def scanned(self, xs, h):
        def step(carry, x):
            t, h = carry
            h = tutti.cond(
                t % 2 == 0, lambda h, x: self.cell(x, h), lambda h, x: (h + x.sum(1, keepdim=True)).sin(), h, x
            )
            return (t + 1, h), h

        (_, h), ys = tutti.scan(step, (torch.zeros((), dtype=torch.int64), h), xs)
        return h, ys


class Searching(Recurrent):
    """A loop whose number of iterations depends on values, outside of gradients."""

    def scanned(self, xs, h):
        h, ys = super().scanned(xs, h)
        with torch.no_grad():
            scale = tutti.while_loop(
                lambda c: c["size"].mean() > 1e-2,
                lambda c: {"size": c["size"] * 0.5, "n": c["n"] + 1},
                {"size": h.abs(), "n": torch.zeros(())},
                expected=6,
            )
        return h * scale["n"], ys


MODELS = [Recurrent, Backwards, Nested, Branching, Searching]


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    return {"x": edges.numbers(ROWS, TIME, 3, seed=seed), "y": edges.labels(seed)[:ROWS] % 3}


def compare(make, plan="dp2", devices=2, microbatches=1, level="O0") -> tuple[tutti.Step, dict[str, torch.Tensor]]:
    """Losses of three steps are those of plain PyTorch; the step, and what plain PyTorch has after these."""
    expected = edges.after_steps(lambda: (make(), batch(), None), 3, microbatches)
    model = make()
    optimizer = edges.optimizer_for(model)
    if plan == "random":
        plan = tutti.random_plan(tutti.capture(model, batch(), optimizer), devices, 1)
    step = tutti.parallelize(model, optimizer, batch(), cluster=f"cpu:{devices}", plan=plan, level=level,
                             accumulate=microbatches)  # fmt: skip
    for i in range(3):
        torch.testing.assert_close(step(batch()), expected[f"loss {i}"], rtol=1e-5, atol=1e-6)
    return step, expected


def cases():
    for i, model in enumerate(MODELS):
        for k, plan in enumerate(PLANS):
            yield pytest.param(model, plan, marks=[] if (i + k) % 3 == 0 else [pytest.mark.slow])


@pytest.mark.parametrize(("make", "plan"), list(cases()))
def test_training_equals_plain_loops(make, plan):
    step, expected = compare(make, plan, PLANS[plan], 2 if plan == "pp2" else 1)
    for name, value in step.training_state().items():
        if name.startswith("param:"):
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_rows_are_split_and_gradients_of_weights_are_partial_sums():
    model = Recurrent()
    step = tutti.parallelize(model, edges.optimizer_for(model), batch(), cluster="cpu:2", plan="dp2", level="O0")
    loops = {label: choices for label, choices in step.plan.operators.items() if "scan" in label}
    assert len(loops) == 2
    assert all(choices["dp"].factor for choices in loops.values())
    assert {c.kind for c in step.collectives()} == {"all_reduce"}  # of the loss and of gradients


def test_the_number_of_steps_does_not_change_the_size_of_the_graph():
    sizes = set()
    for steps in (4, 400):
        model = Recurrent()
        data = {"x": edges.numbers(ROWS, steps, 3), "y": edges.labels()[:ROWS] % 3}
        graph = tutti.capture(model, data, edges.optimizer_for(model))
        sizes.add(len(graph.calls))
    assert len(sizes) == 1


def test_prices_grow_with_the_number_of_steps():
    seconds = []
    for steps in (10, 100):
        model = Recurrent()
        data = {"x": edges.numbers(ROWS, steps, 3), "y": edges.labels()[:ROWS] % 3}
        step = tutti.parallelize(model, edges.optimizer_for(model), data, cluster="h100:2", plan="dp2")
        seconds.append(step.plan.predicted.compute_seconds)
    assert 5 < seconds[1] / seconds[0] < 10


def test_second_derivatives():
    """A gradient penalty differentiates the backward pass of a scan."""

    def loss(model, batch):
        x = batch["x"].clone().requires_grad_()
        value = model(x, batch["y"])
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    model, theirs = Recurrent(), Recurrent()
    step = tutti.parallelize(model, edges.optimizer_for(model), batch(), loss=loss, cluster="cpu:2", plan="dp2",
                             level="O0")  # fmt: skip
    optimizer = edges.optimizer_for(theirs)
    for _ in range(2):
        optimizer.zero_grad()
        expected = loss(theirs, batch())
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch()), expected.detach(), rtol=1e-5, atol=1e-6)


def test_second_derivatives_of_what_keeps_its_output():
    """The backward passes of tanh and exp read what the forward pass gave."""

    def curvature(a):
        a = a.detach().clone().requires_grad_()
        last, ys = tutti.scan(lambda h, x: (torch.tanh(h * x), h.exp()), a, torch.ones(3, 4))
        (first,) = torch.autograd.grad(last.sum() + ys.sum(), a, create_graph=True)
        return torch.autograd.grad(first.sum(), a)[0]

    a = torch.linspace(0.1, 1.0, 4)
    function = tutti.function(curvature, a, cluster="cpu:1", plan="single", level="O0")
    torch.testing.assert_close(function(a), curvature(a), rtol=1e-5, atol=1e-6)


class Alternating(Recurrent):
    """Inner scans that differ in their gradients alone."""

    def scanned(self, xs, h):
        for detaches in (False, True):

            def step(h, x, detaches=detaches):
                return self.cell(x, h.detach() if detaches else h), None

            h, _ = tutti.scan(lambda h, i, step=step: (tutti.scan(step, h, xs)[0], None), h, length=2)
        return h, h[None]


class Meeting(Recurrent):
    """Rows that meet: they stay whole."""

    def scanned(self, xs, h):
        def step(h, x):
            h = self.cell(x, h)
            return torch.tanh(0.1 * (h @ h.t()) @ h), h - h.flip(0)

        return tutti.scan(step, h, xs)


@pytest.mark.parametrize("make", [Alternating, Meeting])
def test_gradients_that_stop_and_rows_that_meet(make):
    compare(make)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


TABLE = torch.zeros(ROWS, 2 * WIDTH)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda h, x: (h + torch.rand_like(h), None), "in the body of a loop: random numbers would be the same"),
        (lambda h, x: (Straight.apply(h), None), "Straight is called within a loop"),
        (lambda h, x: (h + TABLE.add_(1.0), None), "writes into the carry, into x or into a tensor from outside"),
        (lambda h, x: (h.add_(1.0), None), "writes into the carry"),
        (lambda h, x: (h.detach()[0].mul_(2.0).sum() + h, None), "writes into the carry"),
        (lambda h, x: ((h * 2).detach()[0].mul_(2.0).sum() + h, None), "clone it after detach"),
        (lambda h, x: (h[:1], None), r"body changes a tensor of the carry from float32\[8, 8\]"),
        (lambda h, x: (h, None, None), "body returns tuple, not a pair"),
        (lambda h, x: ([h], None), "body changes the structure of the carry"),
        (lambda h, x: (h, 1.0), "y of a loop has a leaf 1.0 of type float"),
        (lambda h, x: (h if h.sum() > 0 else -h, None), "branches on the values of a tensor"),
    ],
)
def test_bodies_that_are_refused(step, message):
    class Model(Recurrent):
        def scanned(self, xs, h):
            return tutti.scan(step, h, xs)[0], xs.sum(2, keepdim=True)

    model = Model()
    with pytest.raises(ValueError, match=rf"test_loops.py:\d+, `.*`: .*{message}"):
        tutti.capture(model, batch(), edges.optimizer_for(model))


def test_branches_that_differ_are_refused_with_their_line():
    class Model(Recurrent):
        def scanned(self, xs, h):
            return tutti.cond(h.sum() > 0, lambda: h, lambda: h[:1]), xs.sum(2, keepdim=True)

    model = Model()
    message = (
        r"test_loops.py:\d+, `.*tutti\.cond\(.*`: tutti.cond: the branches return float32\[8, 8\] and float32\[1, 8\]"
    )
    with pytest.raises(ValueError, match=message):
        tutti.capture(model, batch(), edges.optimizer_for(model))


def test_the_same_body_is_the_same_operator():
    targets = []
    for _ in range(2):
        model = Recurrent()
        graph = tutti.capture(model, batch(), edges.optimizer_for(model))
        targets.append([node.target for node in graph.calls if "tutti_loops" in str(node.target)])
    assert targets[0] == targets[1] and len(targets[0]) == 2


def test_loops_in_functions_without_a_module():
    """An integrator as a pure function: rows are split, and no communication is needed."""

    def integrate(x, v, forces):
        def step(state, f):
            x, v = state
            v = v + 0.1 * (f - x)
            return (x + 0.1 * v, v), (v * v).sum(1)

        return tutti.scan(step, (x, v), forces)

    inputs = edges.numbers(4, 3), edges.numbers(4, 3, seed=2), edges.numbers(5, 4, 3, seed=3)
    expected = integrate(*inputs)
    function = tutti.function(integrate, *inputs, cluster="cpu:2", plan="dp2", level="O0")
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(function(*inputs)),
                            torch.utils._pytree.tree_leaves(expected), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_loops_under_vmap():
    """Weights and rows differ between members; gradients are taken within the body."""

    def fitted(w, xs):
        def step(w, x):
            gradient = torch.func.grad(lambda w: (x @ w).tanh().square().sum())(w)
            return w - 0.1 * gradient, gradient.norm()

        return tutti.scan(step, w, xs)

    w, xs = edges.numbers(4, 3, 2), edges.numbers(4, 5, 3, seed=2)
    function = tutti.function(lambda w, xs: torch.vmap(fitted)(w, xs), w, xs, cluster="cpu:1", level="O0")
    last, norms = function(w, xs)
    for i in range(4):
        one, its_norms = fitted(w[i], xs[i])
        torch.testing.assert_close(last[i], one, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norms[i], its_norms, rtol=1e-5, atol=1e-6)
    assert len([node for node in function.graph.calls if "tutti_loops" in str(node.target)]) == 1


def test_equal_results_of_a_compiled_body_stay_two_tensors():
    """Inductor computes equal expressions once; a carry that is moved twice would crash."""

    def run(x):
        def body(carry, i):
            a, b = carry
            return (a + b, a + b), a.sum()

        return tutti.scan(body, (x, 2 * x), torch.arange(4))

    x = edges.numbers(3)
    (a, b), sums = tutti.function(run, x, cluster="cpu:1", level="O2")(x)
    (expected, _), expected_sums = run(x)
    torch.testing.assert_close(a, expected)
    torch.testing.assert_close(b, expected)
    torch.testing.assert_close(sums, expected_sums)


@pytest.mark.parametrize("make", [Recurrent, *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS[1:])])
def test_compiled_loops(make):
    compare(make, level="O2")
