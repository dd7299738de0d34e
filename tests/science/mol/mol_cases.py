"""What the tests of molecular dynamics share: pairs by brute force, cells of all shapes, finite differences."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol.neighbors import NeighborList, Pairs

CELLS = {
    "cubic": [[6.0, 0, 0], [0, 6, 0], [0, 0, 6]],
    "orthorhombic": [[5.0, 0, 0], [0, 7, 0], [0, 0, 9]],
    "triclinic": [[6.0, 0, 0], [2, 6, 0], [-1, 2.5, 6]],
    "left-handed": [[0.0, 6, 0], [6, 1, 0], [1, -1, 7]],
    "strongly skewed": [[5.0, 0, 0], [13, 5, 0], [-9, 17, 5]],
    "anisotropic": [[30.0, 0, 0], [0, 1.7, 0], [0.3, 0, 6]],
    "one small edge": [[1.1, 0, 0], [0.4, 8, 0], [0, 0, 9]],
    "smaller than the cutoff": [[1.5, 0, 0], [0.3, 1.4, 0], [0.2, -0.5, 1.6]],
}


def matrix(name: str) -> Tensor:
    return torch.tensor(CELLS[name], dtype=torch.float64)


def brute_force(positions: Tensor, cell: Tensor | None, pbc: cells.Periodic, cutoff: float) -> Counter:
    """All (i, j, shift) of one replica, both directions, by trying all images that can be near."""
    if cell is None or not any(pbc):
        counts, cell = (0, 0, 0), torch.eye(3, dtype=torch.float64)
    else:
        full = cells.complete(cell, pbc)
        spread = cells.fractional(positions, full)
        reach = cutoff / cells.widths(full) + (spread.amax(0) - spread.amin(0))
        counts = [int(n) + 1 if flag else 0 for n, flag in zip(reach, pbc, strict=True)]
    shifts = torch.tensor(list(itertools.product(*[range(-n, n + 1) for n in counts])))
    edges = Counter()
    for part in shifts.split(20_000):
        d = positions[None, None] - positions[None, :, None] + (part.to(torch.float64) @ cell)[:, None, None]
        s, i, j = (d.norm(dim=-1) < cutoff).nonzero().T
        self_pair = (i == j) & (part[s] == 0).all(-1)
        for a, b, m in zip(i[~self_pair].tolist(), j[~self_pair].tolist(), part[s[~self_pair]].tolist(), strict=True):
            edges[a, b, tuple(m)] += 1
    return edges


def listed(pairs: Pairs, replica: int = 0) -> Counter:
    """(i, j, shift) of one replica, both directions."""
    mine = pairs.where(pairs.replica == replica)
    edges = Counter()
    for i, j, s in zip(mine.i.tolist(), mine.j.tolist(), mine.shift.tolist(), strict=True):
        edges[i, j, tuple(s)] += 1
        if pairs.half:
            edges[j, i, tuple(-x for x in s)] += 1
    return edges


def pairs_of(positions: Tensor, cell: Tensor | None, cutoff: float, pbc=None, skin: float = 0.0, **options) -> Pairs:
    """The pairs within the cutoff of (N, 3) positions or replicas of them."""
    x = positions.reshape(-1, *positions.shape[-2:])
    h = None if cell is None else cells.as_cell(cell, len(x))
    neighbors = NeighborList(cutoff, skin, pbc=pbc, **options)
    neighbors.update(x, h)
    return neighbors.pairs.within(cutoff, x, h)


def finite_difference_forces(potential, positions: Tensor, cell: Tensor | None, pairs: Pairs, atoms, h=1e-5) -> Tensor:
    """-dU/dx (len(atoms), 3) of replica 0, by central differences of its definition."""
    forces = torch.zeros(len(atoms), 3, dtype=torch.float64)
    for row, atom in enumerate(atoms):
        for axis in range(3):
            ends = []
            for sign in (1, -1):
                x = positions.clone()
                x[0, atom, axis] += sign * h
                ends.append(potential.energy(x, cell, pairs)[0])
            forces[row, axis] = -(ends[0] - ends[1]) / (2 * h)
    return forces


def finite_difference_virial(potential, positions: Tensor, cell: Tensor | None, pairs: Pairs, h=1e-5) -> Tensor:
    """-dU/d(strain) (3, 3) of replica 0."""
    virial = torch.zeros(3, 3, dtype=torch.float64)
    for a, b in itertools.product(range(3), range(3)):
        ends = []
        for sign in (1, -1):
            F = torch.eye(3, dtype=torch.float64)
            F[a, b] += sign * h
            ends.append(potential.energy(positions @ F, None if cell is None else cell @ F, pairs)[0])
        virial[a, b] = -(ends[0] - ends[1]) / (2 * h)
    return virial


def nist(name: str) -> tuple[Tensor, Tensor, list[str]]:
    """Positions (N, 3), edges (3) and elements of a configuration of NIST's."""
    lines = (Path(__file__).parent / "nist" / name).read_text().split("\n")
    rows = [line.split() for line in lines[2:] if line.strip()]
    x = torch.tensor([[float(v) for v in row[1:4]] for row in rows], dtype=torch.float64)
    edges = torch.tensor([float(v) for v in lines[1].split()[1:]], dtype=torch.float64)
    assert len(x) == int(lines[0])
    return x, edges, [row[4] for row in rows if len(row) > 4]
