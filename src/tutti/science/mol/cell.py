"""Periodic cells: (..., 3, 3), rows are lattice vectors; fractional coordinates, reduction, widths, nearest images.

Positions are row vectors: x = s @ cell. All functions are differentiable where that makes sense.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Periodic = tuple[bool, bool, bool]


def periodic(pbc: bool | Sequence[bool] | None, cell: Tensor | None) -> Periodic:
    """Which axes are periodic: all of them if there is a cell and nothing is said, none without a cell."""
    if pbc is None:
        pbc = cell is not None
    flags = (bool(pbc),) * 3 if isinstance(pbc, bool) else tuple(bool(x) for x in pbc)
    if len(flags) != 3:
        raise ValueError(f"pbc has {len(flags)} flags, but there are 3 lattice vectors")
    if any(flags) and cell is None:
        raise ValueError("pbc is set, but there is no cell; give cell= or pbc=False")
    return flags[0], flags[1], flags[2]


def as_cell(cell: Tensor | Sequence[float] | float | None, replicas: int) -> Tensor | None:
    """(R, 3, 3) float64 from an edge, three edges, a matrix or one matrix for each replica."""
    if cell is None:
        return None
    matrix = torch.as_tensor(cell, dtype=torch.float64)
    if matrix.ndim == 0:
        matrix = matrix.expand(3)
    if matrix.shape == (3,):
        matrix = torch.diag(matrix)
    if matrix.shape[-2:] != (3, 3) or matrix.ndim > 3:
        raise ValueError(
            f"the cell has shape {tuple(matrix.shape)}; it is an edge, three edges, or (3, 3) lattice vectors"
        )
    if matrix.ndim == 3 and len(matrix) not in (1, replicas):
        raise ValueError(f"there are {len(matrix)} cells for {replicas} replicas")
    return matrix.expand(replicas, 3, 3).contiguous()


def check(cell: Tensor, pbc: Periodic) -> None:
    """Raise ValueError where periodic lattice vectors are not finite or not independent."""
    rows = [k for k in range(3) if pbc[k]]
    for replica, matrix in enumerate(cell.reshape(-1, 3, 3)):
        vectors = matrix.detach()[rows]
        if not bool(vectors.isfinite().all()):
            raise ValueError(f"the cell of replica {replica} is not finite: {matrix.tolist()}")
        lengths = vectors.norm(dim=-1)
        span = torch.linalg.det(vectors @ vectors.T).clamp(min=0).sqrt() if rows else torch.ones(())
        if not bool(span > 1e-9 * lengths.prod()) or not bool((lengths > 0).all()):
            raise ValueError(
                f"the periodic lattice vectors of replica {replica} are zero or not independent: {vectors.tolist()};"
                " set pbc=False for axes that do not repeat"
            )


def from_tilts(edges: Sequence[float], tilts: Sequence[float]) -> Tensor:
    """(3, 3) from (Lx, Ly, Lz) and (xy, xz, yz), as LAMMPS and NIST's tables give triclinic cells.

    >>> from_tilts((4, 5, 6), (1, 0, 2)).tolist()
    [[4.0, 0.0, 0.0], [1.0, 5.0, 0.0], [0.0, 2.0, 6.0]]
    """
    (x, y, z), (xy, xz, yz) = edges, tilts
    return torch.tensor([[x, 0, 0], [xy, y, 0], [xz, yz, z]], dtype=torch.float64)


def from_parameters(lengths: Sequence[float], angles: Sequence[float]) -> Tensor:
    """(3, 3) from the lengths of a, b, c and the angles alpha (of b and c), beta (a, c), gamma (a, b) in degrees; a
    lies along x and b in the plane of x and y."""
    (a, b, c), (alpha, beta, gamma) = lengths, (math.radians(x) for x in angles)
    x, y = math.cos(beta), (math.cos(alpha) - math.cos(beta) * math.cos(gamma)) / math.sin(gamma)
    if 1 - x * x - y * y <= 0:
        raise ValueError(f"there is no cell with angles {tuple(angles)}: each must be less than the sum of the others")
    rows = [
        [a, 0, 0],
        [b * math.cos(gamma), b * math.sin(gamma), 0],
        [c * x, c * y, c * math.sqrt(1 - x * x - y * y)],
    ]
    return torch.tensor(rows, dtype=torch.float64)


def volume(cell: Tensor) -> Tensor:
    """(...), positive."""
    a, b, c = cell.unbind(-2)
    return (torch.linalg.cross(a, b) * c).sum(-1).abs()  # much faster than LAPACK for a few matrices


def fractional(positions: Tensor, cell: Tensor) -> Tensor:
    """Coordinates in lattice vectors; positions (..., N, 3)."""
    return positions @ torch.linalg.inv(cell)


def cartesian(coordinates: Tensor, cell: Tensor) -> Tensor:
    return coordinates @ cell


def widths(cell: Tensor) -> Tensor:
    """Distances between opposite faces (..., 3): the cell contains a ball of the least of them as diameter."""
    return 1 / torch.linalg.inv(cell).norm(dim=-2)


def wrap(positions: Tensor, cell: Tensor, pbc: Periodic = (True, True, True)) -> Tensor:
    """Positions folded into the cell along periodic axes, for pictures and files."""
    s = fractional(positions, complete(cell, pbc))
    fold = s.floor() * torch.tensor(pbc, dtype=s.dtype)
    return positions - fold @ complete(cell, pbc)


def complete(cell: Tensor, pbc: Periodic) -> Tensor:
    """The cell with unit vectors, orthogonal to the periodic lattice vectors, in place of the others."""
    if all(pbc):
        return cell
    rows = [k for k in range(3) if pbc[k]]
    others = [k for k in range(3) if not pbc[k]]
    full = torch.zeros_like(cell)
    full[..., rows, :] = cell[..., rows, :]
    if not rows:
        return torch.eye(3, dtype=cell.dtype).expand(cell.shape).clone()
    q = torch.linalg.qr(cell[..., rows, :].transpose(-1, -2), mode="complete").Q  # (..., 3, 3)
    full[..., others, :] = q[..., :, len(rows) :].transpose(-1, -2)
    return full


def reduce(cell: Tensor, pbc: Periodic = (True, True, True)) -> tuple[Tensor, Tensor]:
    """Short, nearly orthogonal vectors of the same lattice, and the integer matrix T with reduced = T @ cell.

    (3, 3) each. Pairs of vectors are reduced (Lagrange and Gauss) until none gets shorter, then sums of two are tried.
    """
    vectors, steps = cell.detach().clone(), torch.eye(3, dtype=torch.int64)
    rows = [k for k in range(3) if pbc[k]]
    moves = [(k, {j: 1}) for k in rows for j in rows if j != k]
    if len(rows) == 3:
        moves += [(k, {(k + 1) % 3: a, (k + 2) % 3: 1}) for k in rows for a in (1, -1)]
    changed = True
    while changed:
        changed = False
        for k, combination in moves:
            other = sum(a * vectors[j] for j, a in combination.items())
            assert isinstance(other, Tensor)
            n = torch.round(vectors[k] @ other / (other @ other))
            shorter = vectors[k] - n * other
            if n != 0 and shorter @ shorter < (1 - 1e-12) * (vectors[k] @ vectors[k]):
                vectors[k] = shorter
                for j, a in combination.items():
                    steps[k] -= int(n) * a * steps[j]
                changed = True
    return vectors, steps


def minimum_image(d: Tensor, cell: Tensor | None, pbc: Periodic = (True, True, True)) -> Tensor:
    """The shortest image of differences d (R, ..., 3) in cells (R, 3, 3), whatever the cell's shape.

    Rounding of fractional coordinates finds it if it is shorter than half the least width. Elsewhere the neighbouring
    images are tried too, in the reduced cell.
    """
    if cell is None or not any(pbc):
        return d
    shape = d.shape
    d = d.reshape(len(cell), -1, 3)
    periodic_axes = torch.tensor(pbc, dtype=d.dtype)
    near = d - (fractional(d.detach(), complete(cell.detach(), pbc)).round() * periodic_axes) @ cell
    limit = widths(complete(cell.detach(), pbc))[..., list(pbc)].amin(-1) / 2 if any(pbc) else None
    if limit is not None and bool((near.detach().norm(dim=-1) > limit[:, None]).any()):
        near = torch.stack([_nearest(x, h, pbc) for x, h in zip(near, cell, strict=True)])
    return near.reshape(shape)


def _nearest(d: Tensor, cell: Tensor, pbc: Periodic) -> Tensor:
    reduced, steps = reduce(cell, pbc)
    axes = torch.tensor(pbc, dtype=d.dtype)
    n = fractional(d.detach(), complete(reduced, pbc)).round() * axes  # in reduced vectors
    trials = itertools.product(*[(-1.0, 0.0, 1.0) if flag else (0.0,) for flag in pbc])
    shifts = torch.tensor(list(trials), dtype=d.dtype)
    lengths = (d.detach()[:, None] - (n[:, None] + shifts) @ reduced).norm(dim=-1)
    best = n + shifts[lengths.argmin(-1)]
    return d - (best @ steps.to(d.dtype)) @ cell


def require_minimum_image(cell: Tensor, pbc: Periodic, cutoff: float, what: str) -> None:
    """Raise ValueError where two images of one atom can lie within the cutoff."""
    if not any(pbc):
        return
    least = float(widths(complete(cell, pbc))[..., list(pbc)].min())
    if cutoff > least / 2 and not math.isclose(cutoff, least / 2, rel_tol=1e-12):
        raise ValueError(
            f"{what} needs a cutoff of at most half the least width of the cell, {least / 2:.6g}, but it is"
            f" {cutoff:.6g}; take a larger cell or a shorter cutoff"
        )
