"""Training in a subspace: its update, its basis, and runs that switch to it."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import tutti
from optim_cases import MLP, batches
from tutti.train.boost import Boost
from tutti.train.boost.algorithm import default_loss
from tutti.train.boost.dim_reduce import DimReduce, lifted, principal_components, projected
from tutti.train.boost.reduced import Reduced


class Quadratic(nn.Module):
    """(w - 1)^T A (w - 1) / 2 with the eigenvalues 0.3 ... 1.2."""

    def __init__(self, size=6):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        turn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
        self.register_buffer("a", turn @ torch.diag(torch.linspace(0.3, 1.2, size, dtype=torch.float64)) @ turn.T)

    def forward(self, x):
        return (self.w - 1) @ self.a @ (self.w - 1) / 2 + 0 * x.sum()


def test_superlinear_convergence_on_a_quadratic():
    """With a subspace of all weights: each error is a smaller part of the one before."""
    model, algorithm, batch = Quadratic(), DimReduce(components=6, reset=False), {"x": torch.zeros(1)}
    state = algorithm.first_state([torch.eye(6, dtype=torch.float64)])
    errors = []
    for _ in range(30):
        algorithm.update(state, model, batch, default_loss)
        errors.append((model.w - 1).norm().item())
    assert errors[15] < 1e-14
    ratios = [b / a for a, b in pairwise(errors) if a > 1e-13]
    assert max(ratios[-5:]) < 0.15 and min(ratios[-5:]) < 0.05 < max(ratios[:3])
    torch.testing.assert_close(state["inverse"] @ model.a, torch.eye(6, dtype=torch.float64), rtol=0, atol=0.05)


def test_only_the_subspace_moves_without_alpha():
    model, algorithm, batch = Quadratic(), DimReduce(components=2, alpha=0.0), {"x": torch.zeros(1)}
    rows = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64)).Q.T
    state = algorithm.first_state([rows])
    for _ in range(20):
        loss = algorithm.update(state, model, batch, default_loss)
    w = model.w.detach()
    torch.testing.assert_close(rows.T @ (rows @ w), w)  # in the subspace
    gradient = model.a @ (w - 1)
    assert (rows @ gradient).norm() < 1e-6 and loss < model(torch.zeros(1)) + 1e-9  # and the best there


def test_a_reset_after_a_failed_line_search():
    """The curvature is too large for three tries: the step is the momentum alone, and BFGS begins anew."""
    batch = {"x": torch.zeros(1)}
    for reset in (False, True):
        model, algorithm = Quadratic(), DimReduce(components=6, reset=reset, alpha=0.0)
        model.a *= 40
        state = algorithm.first_state([torch.eye(6, dtype=torch.float64)])
        before = model(torch.zeros(1)).item()
        for _ in range(3):
            algorithm.update(state, model, batch, default_loss)
        after = model(torch.zeros(1)).item()
        assert after == before if reset else after > 10 * before
        assert torch.equal(state["inverse"], torch.eye(6, dtype=torch.float64))
        assert state["started"].item() == (not reset)
    model.a /= 40
    for _ in range(16):
        algorithm.update(state, model, batch, default_loss)
    assert (model.w - 1).norm() < 1e-12


def test_trials_leave_statistics_of_batch_norms_alone():
    """They see the batch once, with the parameters before the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    other, batch = copy.deepcopy(model), (torch.randn(8, 3),)
    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    algorithm = DimReduce(components=1)
    size = sum(p.numel() for p in model.parameters())
    row = nn.functional.normalize(torch.randn(size), dim=0)
    parts = row.split([p.numel() for p in model.parameters()])
    basis = [part.reshape(1, *p.shape) for part, p in zip(parts, model.parameters(), strict=True)]
    algorithm.update(algorithm.first_state(basis), model, batch, loss)
    loss(other, batch)
    for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def reference(state, w, gradient, value_of, algorithm):
    """One step on a vector of weights, line by line as in the definition."""
    p, k = state["P"], algorithm.components
    q = p @ gradient
    if state["last_q"] is not None:
        y, s = q - state["last_q"], state["s"]
        if y @ s > 1e-20:
            left = torch.eye(k, dtype=w.dtype) - torch.outer(s, y) / (y @ s)
            state["B"] = left @ state["B"] @ left.T + torch.outer(s, s) / (y @ s)
    state["last_q"] = q
    d = -state["B"] @ q
    for m in range(3):
        rate = algorithm.rho**m
        if value_of(w + p.T @ (rate * d)) < value_of(w) + algorithm.sigma * rate * (q @ d):
            state["s"] = rate * d
            break
    state["v"] = algorithm.gamma * state["v"] + gradient - p.T @ q
    return w + p.T @ (rate * d) - algorithm.alpha * state["v"]


def test_steps_equal_the_definition():
    model, algorithm, batch = Quadratic(), DimReduce(components=3, alpha=0.05, reset=False), {"x": torch.zeros(1)}
    rows = torch.linalg.qr(torch.randn(6, 3, dtype=torch.float64)).Q.T
    state, w = algorithm.first_state([rows]), model.w.detach().clone()
    reference_state = {"P": rows, "B": torch.eye(3, dtype=torch.float64), "last_q": None, "s": torch.zeros(3).double(),
                       "v": torch.zeros(6).double()}  # fmt: skip
    for _ in range(6):
        algorithm.update(state, model, batch, default_loss)
        w = reference(reference_state, w, model.a @ (w - 1), lambda x: (x - 1) @ model.a @ (x - 1) / 2, algorithm)
        torch.testing.assert_close(model.w.detach(), w)


def test_principal_components():
    directions = torch.linalg.qr(torch.randn(10, 2)).Q.T
    copies = torch.randn(8, 2) * torch.tensor([5.0, 1.0]) @ directions + torch.randn(10)
    components = principal_components(copies, 2)
    torch.testing.assert_close(components @ components.T, torch.eye(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(components.T @ components, directions.T @ directions, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="8 copies of the weights vary in 2 directions; dim_reduce asks for 3"):
        principal_components(copies, 3)


def test_projection():
    basis, x, c = torch.randn(3, 4, 5), torch.randn(4, 5), torch.randn(3)
    torch.testing.assert_close(projected(basis, x), basis.flatten(1) @ x.flatten())
    torch.testing.assert_close(lifted(basis, c), (basis.flatten(1).T @ c).reshape(4, 5))


def run(plan, algorithm=None):
    model = MLP()
    boost = Boost.parse({"dim_reduce": algorithm or {"components": 3, "every": 2}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    return boost.make_step(model, optimizer, batches()[0], cluster="cpu:2", plan=plan, level="O0")


@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_a_run_switches_and_equals_one_device(plan):
    step = run(plan)
    for batch in batches()[:8]:
        step(batch)
    assert isinstance(step, Reduced) and step.step is None and step.steps == 8
    model = MLP()
    model.load_state_dict(step.state_dict())
    algorithm = DimReduce(components=3)
    state = algorithm.first_state([step.store[f"cache:state.basis.{i}"] for i in range(4)])
    for batch in batches()[8:12]:
        wanted = algorithm.update(state, model, batch, default_loss)
        torch.testing.assert_close(step(batch), wanted, rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(step.state_dict()[name], p.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.evaluate(batches()[0]), model(**batches()[0]).detach(), rtol=1e-4, atol=1e-5)
    assert step.steps == 12 and step.plan.mesh


def test_resumes_before_and_after_the_switch(tmp_path):
    whole = run("dp")
    for i, batch in enumerate(batches()[:12]):
        if i in (5, 10):
            state = {name: x.clone() for name, x in whole.training_state().items()}
            again = run("zero3")
            again.load_training_state(copy.deepcopy(state))
            assert again.steps == i
            again(batches()[i])
            whole_next = whole(batch)
            for name, x in whole.state_dict().items():
                torch.testing.assert_close(again.state_dict()[name], x, rtol=1e-5, atol=1e-6)
            assert whole_next.ndim == 0
        else:
            whole(batch)
    checkpoints = tutti.Checkpoints(tmp_path)
    whole.save(checkpoints)
    checkpoints.wait()
    again = run("dp")
    again.load(checkpoints.latest())
    assert again.steps == 12
    torch.testing.assert_close(again(batches()[12]), whole(batches()[12]))


def test_errors():
    with pytest.raises(ValueError, match="components=0 and every=10 must be at least 1"):
        DimReduce(components=0)
    with pytest.raises(ValueError, match=r"rho=1.5 and sigma=0.4 must be between 0 and 1"):
        DimReduce(rho=1.5)
