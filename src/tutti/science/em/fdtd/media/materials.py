"""Update coefficients from materials, differentiable by autograd.

    a = (1 - x) / (1 + x),  b = dt / (eps0 eps_r (1 + x)),  x = sigma dt / (2 eps0 eps_r)

Values of cells are averaged over the four cells around an edge (two at a face), which is second-order for tangential E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.science.em.fdtd.grid import EPS0, MU0, Grid
from tutti.science.em.shown import brief

Material = float | Tensor | Mapping[str, Tensor]


def in_array(grid: Grid, x: Tensor) -> Tensor:
    """With the axes of the kernels."""
    return x.unsqueeze(1) if grid.flat else x


def around(grid: Grid, cells: Tensor, electric: bool, axis: int) -> tuple[list[Tensor], int]:
    """The values of all cells around a component, each over nodes: E has those beside its edge, H those before and
    behind its face. `axis`: direction of the component, as an axis of the kernels. Beyond the walls the nearest cells
    count."""
    parts = [in_array(grid, cells)]
    for d in range(3):
        if grid.flat and d == 1:
            continue
        across = (d != axis) if electric else (d == axis)
        grown = []
        for x in parts:
            first, last = x.narrow(d, 0, 1), x.narrow(d, x.shape[d] - 1, 1)
            grown.append(torch.cat([x, last], d))
            if across:
                grown.append(torch.cat([first, x], d))
        parts = grown
    return parts, len(parts)


def by_component(grid: Grid, by_name: Mapping[str, Tensor], name: str, what: str, dtype: torch.dtype,
                 device: torch.device) -> Tensor:  # fmt: skip
    """Raises ValueError for names that are no components of the same field, and for a shape that is not the nodes'."""
    components = [x for x in grid.components if x[0] == name[0]]
    for x in by_name:
        if x not in components:
            raise ValueError(f"{what} is given for {x!r}; a grid in mode {grid.mode} has {', '.join(components)}")
    values = torch.as_tensor(by_name[name], dtype=dtype, device=device)
    if tuple(values.shape) != grid.nodes:
        raise ValueError(f"{what} of {name} has shape {tuple(values.shape)}; nodes have {grid.nodes}")
    return values


def check_real(what: str, value: Any) -> None:
    """Raises ValueError for complex numbers."""
    if isinstance(value, complex) or (isinstance(value, Tensor | np.ndarray) and torch.as_tensor(value).is_complex()):
        raise ValueError(f"{what}: real, not {brief(value)}; losses are sigma= (S/m), or poles= of a dispersive medium")


def only(x: Tensor, design: Sequence[slice]) -> Tensor:
    """The same numbers, without gradients outside of a region; everywhere with them if that is empty."""
    if not design or not x.requires_grad:
        return x
    out, here = x.detach().clone(), tuple(design)
    out[here] = x[here]
    return out


def at_component(grid: Grid, material: Material, name: str, what: str, dtype: torch.dtype, device: torch.device,
                 design: Sequence[slice] = ()) -> Tensor:  # fmt: skip
    """A material at the places of a component, as (): everywhere alike, or in the array of the kernels.

    material: a number, a tensor over cells, or a mapping of components to tensors over nodes. design: cells outside of
    which it has no gradients.
    """
    check_real(what, material.get(name) if isinstance(material, Mapping) else material)
    if isinstance(material, Mapping):
        if name not in material:
            raise ValueError(f"{what} is given by component, but without {name}")
        x = by_component(grid, material, name, what, dtype, device)
        return in_array(grid, only(x, [slice(part.start, part.stop + 1) for part in design]))
    if not isinstance(material, float | int | Tensor | np.ndarray):
        raise ValueError(
            f"{what}: a number, a tensor over cells, or several over nodes by component, not {brief(material)}"
        )
    x = torch.as_tensor(material, dtype=dtype, device=device)
    if x.ndim == 0 and design and x.requires_grad:
        x = x.expand(grid.shape)
    if x.ndim == 0:
        return x
    if tuple(x.shape) != grid.shape:
        raise ValueError(f"{what} has shape {tuple(x.shape)}; cells have {grid.shape}")
    axis = grid.component(name) % 3
    parts, count = around(grid, only(x, design), name[0] == "E", axis)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / count


def conductor(grid: Grid, cells: Tensor | Mapping[str, Tensor], name: str, device: torch.device) -> Tensor:
    """Where a component of E is zero: an edge of any conducting cell, or what is given by component over nodes."""
    if isinstance(cells, Mapping):
        cells = {name: torch.zeros(grid.nodes), **cells}
        return in_array(grid, by_component(grid, cells, name, "pec", torch.bool, device))
    x = torch.as_tensor(cells, dtype=torch.bool, device=device)
    if tuple(x.shape) != grid.shape:
        raise ValueError(f"pec has shape {tuple(x.shape)}; cells have {grid.shape}")
    parts, _ = around(grid, x, True, grid.component(name) % 3)
    total = parts[0]
    for part in parts[1:]:
        total = total | part
    return total


def electric(eps_r: Tensor, sigma: Tensor | None, pec: Tensor | None, dt: float) -> tuple[Tensor | None, Tensor]:
    """(a, b) of a component of E; None stands for 1."""
    b = dt / (EPS0 * eps_r)
    a = None
    if sigma is not None:
        x = sigma * dt / (2 * EPS0 * eps_r)
        a, b = (1 - x) / (1 + x), b / (1 + x)
    if pec is not None:
        b = torch.where(pec, 0, b)
        a = None if a is None else torch.where(pec, 1, a)
    return a, b


def magnetic(mu_r: Tensor, dt: float) -> Tensor:
    """b of a component of H."""
    return dt / (MU0 * mu_r)
