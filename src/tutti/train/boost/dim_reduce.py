"""Training in a subspace: quasi-Newton steps along the principal directions of past weights.

Ordinary training comes first. It keeps a copy of the weights at intervals; the first k principal components of these
copies are the rows of P (k x number of weights), orthonormal. Each later step, with loss f, weights w and gradient g:

    q = P g                                             the gradient in the subspace
    B <- (I - r s y^T) B (I - r y s^T) + r s s^T        BFGS with y = q - last q, r = 1 / y.s, if y.s > 1e-20
    d = -B q
    s = rho^m d, m in {0, 1, 2} the first with f(w + P^T s) < f(w) + sigma q.s; else m = 2
    v <- gamma v + (g - P^T q)                          momentum of the gradient outside of the subspace
    w <- w + P^T rho^m d - alpha v

B begins as I. If no m is found, the step still is rho^2 d, but BFGS keeps the s of the last one that was found. So
where the curvature exceeds 2 (1 - sigma) / rho^2, about 4 with the default constants, BFGS does not start, and where
batches disagree, such a step can raise the loss without bound. With `reset`, the default, a step without an m is v
alone, B becomes I again, and the next step leaves it so.

The loss is computed three more times per step, on the same batch; the captured step has no early exit. The formula and
the constants are those of `mindspore.boost.DimReduce`, which never resets. Learning rates and optimizer
state play no part after the ordinary training.

On a CPU this has no gain: with the three forward passes of the line search a step costs about twice as much, and the
subspace of the past weights often has little of what mini-batch training still has to learn. It can help where the loss
is deterministic, as that of a whole data set.

Nocedal and Wright, "Numerical optimization" (2006), chapter 6, for BFGS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from tutti.tracing.batch import Batch
from tutti.train.boost.algorithm import Algorithm, Loss, Training, loss_with
from tutti.train.boost.reduced import Reduced
from tutti.train.values import NamedValues

if TYPE_CHECKING:
    from tutti.api.step import Step

TRIES = 3  # of the line search
EPSILON = 1e-20


@dataclass
class DimReduce(Algorithm):
    """Switch to quasi-Newton steps in a subspace of weights after some ordinary training.

    components: dims k of the subspace.
    every: number of ordinary steps between copies of the weights. After (components + 1) of them training switches.
    reset: take no step in the subspace, and forget B, where the line search fails. False is the behavior of MindSpore.
    rho, sigma: constants of the line search. gamma, alpha: decay and step size of the momentum outside of the subspace.

    The copies take (components + 1) times the memory of the weights in the process, and P takes `components` times that
    of the weights, sharded as a plan says.

    Raises ValueError for values out of range.
    """

    components: int = 32
    every: int = 10
    reset: bool = True
    rho: float = 0.55
    sigma: float = 0.4
    gamma: float = 0.9
    alpha: float = 0.001

    def __post_init__(self):
        if self.components < 1 or self.every < 1:
            raise ValueError(f"components={self.components!r} and every={self.every!r} must be at least 1")
        if not 0 < self.rho < 1 or not 0 < self.sigma < 1 or not 0 <= self.gamma < 1:
            raise ValueError(f"rho={self.rho!r} and sigma={self.sigma!r} must be between 0 and 1, gamma={self.gamma!r} "
                             "at least 0 and less than 1")  # fmt: skip

    def replaced(self, step: Training, batch: Batch, loss: Loss, options: NamedValues) -> Training:
        return Reduced(cast("Step", step), self, batch, loss, options)  # `step` may pass everything on to a Step

    def basis_of(self, copies: Sequence[Tensor]) -> Tensor:
        """The rows of P for copies of the weights, each of shape (number of weights,)."""
        return principal_components(torch.stack(list(copies)), self.components)

    def first_state(self, basis: Sequence[Tensor]) -> NamedValues:
        """The state of the first step in the subspace. basis: P of each parameter, shape (k, *shape)."""
        k, like = self.components, basis[0]
        zeros = lambda *shape: like.new_zeros(shape)  # noqa: E731
        return {
            "basis": list(basis),
            "inverse": torch.eye(k, dtype=like.dtype, device=like.device),
            "last_gradient": zeros(k),
            "last_step": zeros(k),
            "started": zeros(),
            "momentum": [torch.zeros_like(x[0]) for x in basis],
        }

    def update(self, state: NamedValues, model: nn.Module, batch: Batch, loss: Loss) -> Tensor:
        """One step: writes into the model's parameters and replaces tensors of `state`. Returns the loss."""
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        result = loss(model, batch)
        value = result[0] if isinstance(result, tuple) else result
        gradients = torch.autograd.grad(value, list(params.values()))
        with torch.no_grad():
            value, basis = value.detach(), state["basis"]
            q = torch.stack([projected(b, g) for b, g in zip(basis, gradients, strict=True)]).sum(0)
            direction = -self._inverse(state, q) @ q
            moves = [lifted(b, direction) for b in basis]
            slope, rate = self.sigma * (q @ direction), torch.full_like(value, self.rho ** (TRIES - 1))
            improved = torch.zeros_like(value, dtype=torch.bool)
            for i in reversed(range(TRIES)):
                rho = self.rho**i
                trial = self._trial(model, batch, loss, params, moves, rho)
                better = trial < value + rho * slope
                rate = torch.where(better, rho, rate)
                improved = improved | better
            state["last_step"] = torch.where(improved, rate * direction, state["last_step"])
            if self.reset:
                rate = torch.where(improved, rate, 0.0)
                state["inverse"] = torch.where(
                    improved, state["inverse"], torch.eye(len(q), dtype=q.dtype, device=q.device)
                )
                state["started"] = improved.to(q.dtype)
            for i, (p, g) in enumerate(zip(params.values(), gradients, strict=True)):
                rest = self.gamma * state["momentum"][i] + (g - lifted(basis[i], q))
                state["momentum"][i] = rest
                p.add_(rate * moves[i] - self.alpha * rest)
        return value

    def _inverse(self, state: NamedValues, q: Tensor) -> Tensor:
        """The BFGS approximation of the inverse Hessian in the subspace."""
        old, s, y = state["inverse"], state["last_step"], q - state["last_gradient"]
        product = y @ s
        valid = (state["started"] > 0) & (product > EPSILON)
        r = 1 / torch.where(valid, product, 1.0)
        left = torch.eye(len(q), dtype=q.dtype, device=q.device) - r * torch.outer(s, y)
        new = torch.where(valid, left @ old @ left.T + r * torch.outer(s, s), old)
        state["inverse"], state["last_gradient"] = new, q
        state["started"] = torch.ones_like(state["started"])
        return new

    def _trial(self, model: nn.Module, batch: Batch, loss: Loss, params: Mapping[str, Tensor], moves: list[Tensor],
               rho: float) -> Tensor:  # fmt: skip
        """The loss after a step of rho times the moves. Buffers (statistics of batch norms) do not see it."""
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        moved = {name: p + rho * move for (name, p), move in zip(params.items(), moves, strict=True)}
        result = loss_with(moved | buffers, model, batch, loss)
        return result[0] if isinstance(result, tuple) else result


def principal_components(copies: Tensor, count: int) -> Tensor:
    """The first principal components of the rows of (m, n), as orthonormal rows of shape (count, n).

    Raises ValueError if the rows vary in fewer directions than that.
    """
    centered = copies - copies.mean(0)
    _, sizes, rows = torch.linalg.svd(centered, full_matrices=False)
    rank = int((sizes > sizes[0] * 1e-6).sum())
    if rank < count:
        raise ValueError(f"{len(copies)} copies of the weights vary in {rank} directions; dim_reduce asks for {count} "
                         "components: give fewer, or more steps between copies")  # fmt: skip
    return rows[:count]


def projected(basis: Tensor, x: Tensor) -> Tensor:
    """The coordinates of a parameter-shaped tensor: (k, *shape), shape -> (k,)."""
    return (basis * x).flatten(1).sum(1) if x.ndim else basis * x


def lifted(basis: Tensor, coordinates: Tensor) -> Tensor:
    """The parameter-shaped tensor with these coordinates: (k, *shape), (k,) -> shape."""
    return (basis * coordinates.reshape(-1, *[1] * (basis.ndim - 1))).sum(0)
