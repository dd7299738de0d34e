"""Direct solvers of the five-point systems: SuperLU on a CPU, and block elimination in PyTorch on any device.

A solver factors the matrices of some frequencies at once; `solve` is then used for fields and for adjoints, since the
matrices are symmetric.

- `splu`: SciPy's SuperLU. The minimum-degree ordering of the pattern is found once and kept.
- `block`: with unknowns line by line, blocks beside the diagonal are diagonal matrices o, so elimination needs only

      S_0 = D_0,    S_b = D_b - diag(o_b) S_{b-1}^{-1} diag(o_b)

  with dense inverses, batched over frequencies. Memory: 16 bytes times lines times (nodes of a line)^2 a frequency.
- `block32`: the same inverses in complex64, half of that, with refinement: x grows by the solution for the residual,
  which is taken in complex128, until that changes it by less than 1e-12, or rounding keeps it from that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from scipy.sparse import csc_array
from scipy.sparse.linalg import SuperLU as Factors
from scipy.sparse.linalg import splu
from threadpoolctl import ThreadpoolController
from torch import Tensor

from tutti.science.em.mt.response.stencil import Stencil

BLOCK_BYTES = 2**31  # of inverses at once
REFINEMENTS = 20  # at most
REFINED, ROUNDING = 1e-12, 1e-9  # relative changes that end them, and that may stay


class Factorization(Protocol):
    def solve(self, rhs: Tensor) -> Tensor:
        """rhs and solution: (b, r, nodes in z, nodes in x), complex128."""
        ...


class Solver(Protocol):
    threaded: bool  # several `factor` and `solve` at the same time pay
    batch: int  # frequencies to factor at once

    def factor(self, stencil: Stencil, iwmu: Tensor) -> Factorization: ...


class SuperLU:
    """SciPy's sparse LU of one matrix after the other. For one shape of nodes."""

    threaded = True  # a matrix at a time in each thread
    batch = 1

    def __init__(self, shape: tuple[int, int]) -> None:
        n = np.arange(shape[0] * shape[1]).reshape(shape)
        pairs = [(n, n), (n[:, 1:], n[:, :-1]), (n[:, :-1], n[:, 1:]), (n[1:], n[:-1]), (n[:-1], n[1:])]
        self.rows, self.columns = (np.concatenate([p[i].ravel() for p in pairs]) for i in (0, 1))
        self.size = n.size
        self._order(np.arange(n.size))
        pattern = self._matrix(np.where(self.rows == self.columns, 4.0, -1.0))
        factors = splu(pattern, "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
        self._order(np.asarray(factors.perm_c))

    def _order(self, place: np.ndarray) -> None:
        """Unknown i stands at place[i]."""
        self.place, rows, columns = place, place[self.rows], place[self.columns]
        self.entries = np.lexsort((rows, columns))
        self.indices = rows[self.entries].astype(np.int32)
        self.starts = np.searchsorted(columns[self.entries], np.arange(self.size + 1)).astype(np.int32)

    def _matrix(self, entries: np.ndarray) -> csc_array:
        return csc_array((entries[self.entries], self.indices, self.starts), (self.size, self.size))

    def factor(self, stencil: Stencil, iwmu: Tensor) -> SparseFactors:
        diagonal = stencil.diagonal(iwmu).numpy()
        couplings = [-x.numpy().ravel() for x in (stencil.horizontal, stencil.vertical) for _ in (0, 1)]
        matrices = [self._matrix(np.concatenate([d.ravel(), *couplings])) for d in diagonal]
        options = {"SymmetricMode": True}
        return SparseFactors([splu(m, "NATURAL", diag_pivot_thresh=0.0, options=options) for m in matrices], self.place)


@dataclass
class SparseFactors:
    factors: list[Factors]
    place: np.ndarray

    def solve(self, rhs: Tensor) -> Tensor:
        b, r, *shape = rhs.shape  # "T" below: the transpose, which is equal, is solved faster
        flat = rhs.numpy().reshape(b, r, -1)
        out = np.empty_like(flat)
        for i, factors in enumerate(self.factors):
            moved = np.empty_like(flat[i])
            moved[:, self.place] = flat[i]
            np.take(factors.solve(moved.T, "T").T, self.place, axis=1, out=out[i])
        return torch.from_numpy(out).view(b, r, *shape)


class BlockElimination:
    """Block elimination along the longer side of the mesh, batched over frequencies."""

    threaded = False

    def __init__(self, shape: tuple[int, int]) -> None:
        self.batch = max(BLOCK_BYTES // (16 * shape[0] * shape[1] * min(shape)), 1)
        self.across = shape[0] > shape[1]  # lines are rows instead of columns

    def factor(self, stencil: Stencil, iwmu: Tensor) -> Factorization:
        return self.eliminate(stencil, stencil.diagonal(iwmu))

    def eliminate(self, stencil: Stencil, diagonal: Tensor) -> BlockFactors:
        """In the precision of the diagonal."""
        real = diagonal.real.dtype
        line, between = stencil.vertical.to(real), stencil.horizontal.to(real)
        diagonal, line, between = (x.transpose(-1, -2) for x in (diagonal, line, between)) if not self.across else (
            diagonal, between, line)  # fmt: skip
        # diagonal (b, lines, n), couplings in a line (lines, n - 1), between lines (lines - 1, n)
        inverses = []
        for i in range(diagonal.shape[1]):
            s = torch.diag_embed(diagonal[:, i])
            inner = line[i].to(s.dtype)
            s.diagonal(1, 1, 2).sub_(inner)
            s.diagonal(-1, 1, 2).sub_(inner)
            if i:
                o = between[i - 1]
                s -= o[:, None] * inverses[-1] * o
            inverses.append(torch.linalg.inv(s))
        return BlockFactors(inverses, between.contiguous(), self.across)


@dataclass
class BlockFactors:
    inverses: list[Tensor]  # of each line (b, n, n)
    between: Tensor  # couplings of lines (lines - 1, n)
    across: bool

    def solve(self, rhs: Tensor) -> Tensor:
        x = rhs.permute(2, 0, 3, 1) if self.across else rhs.permute(3, 0, 2, 1)  # (lines, b, n, r)
        x = x.contiguous()
        o = self.between[:, :, None]
        last = len(x) - 1
        for i in range(last + 1):
            if i:
                x[i] += o[i - 1] * x[i - 1]
            x[i] = self.inverses[i] @ x[i]
        for i in reversed(range(last)):
            x[i] += self.inverses[i] @ (o[i] * x[i + 1])
        return x.permute(1, 3, 0, 2) if self.across else x.permute(1, 3, 2, 0)


class Block32(BlockElimination):
    """Block elimination in complex64 with iterative refinement in complex128."""

    def factor(self, stencil: Stencil, iwmu: Tensor) -> Refined:
        diagonal = stencil.diagonal(iwmu)
        return Refined(self.eliminate(stencil, diagonal.to(torch.complex64)), stencil, diagonal)


@dataclass
class Refined:
    rough: BlockFactors
    stencil: Stencil
    diagonal: Tensor  # complex128 (b, nodes in z, nodes in x)

    def times(self, x: Tensor) -> Tensor:
        """A x for x of (b, r, nodes in z, nodes in x)."""
        across, down = self.stencil.horizontal, self.stencil.vertical
        out = self.diagonal[:, None] * x
        out[..., 1:] -= across * x[..., :-1]
        out[..., :-1] -= across * x[..., 1:]
        out[..., 1:, :] -= down * x[..., :-1, :]
        out[..., :-1, :] -= down * x[..., 1:, :]
        return out

    def solve(self, rhs: Tensor) -> Tensor:
        x, rest, last = torch.zeros_like(rhs), rhs, torch.inf
        for _ in range(REFINEMENTS):
            scale = rest.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
            step = self.rough.solve((rest / scale).to(torch.complex64)).to(rhs.dtype) * scale
            x = x + step
            change = step.abs().amax((-2, -1)) / x.abs().amax((-2, -1)).clamp_min(1e-300)
            at_rounding = (change > last / 4) & (change <= ROUNDING)  # of the residual, as in complex128
            if ((change <= REFINED) | at_rounding).all():
                return x
            rest, last = rhs - self.times(x), change
        raise ArithmeticError(
            f"refinement of complex64 did not converge in {REFINEMENTS} steps; use solver='block', in complex128"
        )


def one_blas_thread() -> AbstractContextManager:
    """One thread each for SuperLU's calls of OpenBLAS: its matrices are small, and its own threads wait by spinning."""
    return _openblas().limit(limits=1)


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")


SOLVERS: dict[str, Callable[[tuple[int, int]], Solver]] = {
    "splu": SuperLU,
    "block": BlockElimination,
    "block32": Block32,
}
