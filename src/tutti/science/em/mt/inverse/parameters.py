"""What an inversion changes: resistivities of cells, codes of columns, or both.

A parametrisation maps a vector p to a model m(p), log10 ohm-m of cells, and penalises it by a quadratic form

    R(p) = |L (m(p) - reference)|^2 + |E p|^2

`linearize(p)` gives D = dm/dp, sparse, and the form's matrix and gradient at p:  D^T L^T L D + E^T E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from tutti.science.em.mt.inverse.vae import VAE
from tutti.science.em.mt.mesh import Mesh2D


def neighbours(mesh: Mesh2D) -> tuple[np.ndarray, np.ndarray]:
    """Flat numbers of adjacent cells: side by side, and one below the other; each (2, pairs)."""
    n = np.arange(mesh.cells).reshape(mesh.shape)
    return np.stack([n[:, :-1].ravel(), n[:, 1:].ravel()]), np.stack([n[:-1].ravel(), n[1:].ravel()])


def roughness(pairs: np.ndarray, weights: np.ndarray, small: np.ndarray) -> sp.csr_array:
    """L (rows, cells) with |L m|^2 = sum of weights (m_i - m_j)^2 over pairs + sum of small m_i^2 over cells."""
    pairs, weights = pairs[:, weights > 0], weights[weights > 0] ** 0.5
    rows = np.arange(len(weights))
    values = np.concatenate([weights, -weights])
    differences = sp.csr_array((values, (np.tile(rows, 2), pairs.ravel())), shape=(len(rows), len(small)))
    return sp.csr_array(sp.vstack([differences, sp.csr_array(sp.diags_array(small**0.5))[small > 0]]))


class Local(NamedTuple):
    """A parametrisation at p. jacobian: D (cells, parameters). matrix: matrix of the penalty, (parameters, parameters).
    gradient: half the penalty's derivative. penalty: value of the penalty."""

    jacobian: sp.csr_array
    matrix: sp.csc_array
    gradient: np.ndarray
    penalty: float


class Parameters(Protocol):
    """cap: the largest change of each parameter in a step (n), float64."""

    cap: Tensor

    def start(self, model: Tensor) -> Tensor:
        """The parameters (n), float64, that are nearest to a model (nz, nx)."""
        ...

    def model(self, p: Tensor) -> Tensor:
        """log10 ohm-m of cells (nz, nx), float64."""
        ...

    def linearize(self, p: Tensor) -> Local: ...


class Pixel:
    """Every cell is a parameter, and adjacent cells shall differ little from the differences of `reference`.

    reference: log10 ohm-m, (nz, nx) or a number; by default where the inversion starts.
    """

    def __init__(self, mesh: Mesh2D, *, along: float = 1.0, down: float = 1.0, small: float = 1e-3,
                 reference: Tensor | float | None = None, step: float = 1.2) -> None:  # fmt: skip
        if along < 0 or down < 0 or not small > 0:
            raise ValueError(f"along and down must not be negative, small must be positive: {along}, {down}, {small}")
        self.mesh = mesh
        across, below = neighbours(mesh)
        weights = np.concatenate([np.full(across.shape[1], along), np.full(below.shape[1], down)])
        rough = roughness(np.hstack([across, below]), weights, np.full(mesh.cells, small))
        self.matrix = sp.csc_array(rough.T @ rough)
        self.cap = torch.full((mesh.cells,), step, dtype=torch.float64)
        self.own_reference = None if reference is None else torch.as_tensor(reference).double().expand(mesh.shape)
        self.reference: Tensor | None = self.own_reference

    def start(self, model: Tensor) -> Tensor:
        self.reference = model.double().clone() if self.own_reference is None else self.own_reference
        return model.double().flatten().clone()

    def model(self, p: Tensor) -> Tensor:
        return p.view(self.mesh.shape)

    def linearize(self, p: Tensor) -> Local:
        assert self.reference is not None, "start() sets it"
        difference = (p - self.reference.flatten()).numpy()
        gradient = self.matrix @ difference
        return Local(sp.csr_array(sp.eye_array(len(p))), self.matrix, gradient, float(difference @ gradient))


@dataclass(frozen=True)
class Region:
    """A block of cells whose columns are coded: rows and columns of the mesh."""

    rows: slice
    columns: slice

    @staticmethod
    def of(mesh: Mesh2D, left: float, right: float, top: float = 0.0, bottom: float = float("inf")) -> Region:
        """The cells whose centres lie in an area, in metres."""
        x, z = mesh.x, mesh.z
        columns = torch.nonzero((x >= left) & (x <= right)).flatten()
        rows = torch.nonzero((z >= top) & (z <= bottom)).flatten()
        if not len(columns) or not len(rows):
            raise ValueError(
                f"the region x {left:g} to {right:g} m, z {top:g} to {bottom:g} m holds no cell; the mesh spans x"
                f" {mesh.x_edges[0]:g} to {mesh.x_edges[-1]:g} m, z 0 to {mesh.z_edges[-1]:g} m"
            )
        return Region(slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))

    def numbers(self, mesh: Mesh2D) -> np.ndarray:
        """The flat numbers of its cells, (rows, columns)."""
        return np.arange(mesh.cells).reshape(mesh.shape)[self.rows, self.columns]


class Coded:
    """Columns of a region are decoded from codes; the other cells are parameters themselves.

    p holds codes (columns, codes), then cells. With `deviation` in decades, p has every cell and those of the region
    are added to what is decoded, each of that standard deviation: what the prior cannot say stays possible, at a price.
    lateral: weight of the differences between adjacent decoded columns. Penalties are those of a normal prior:
    |code|^2 + lateral |Dx decoded|^2 + pixels (roughness of the other cells) + |deviation|^2 / sd^2.
    """

    def __init__(self, mesh: Mesh2D, vae: VAE, region: Region, *, lateral: float = 10.0, pixels: float = 10.0,
                 deviation: float | None = None, step: float = 2.5) -> None:  # fmt: skip
        if lateral < 0 or not pixels > 0 or (deviation is not None and not deviation > 0):
            raise ValueError("lateral must not be negative, pixels and deviation must be positive:"
                             f" {lateral}, {pixels}, {deviation}")  # fmt: skip
        self.mesh, self.vae, self.region, self.deviation = mesh, vae, region, deviation
        inside = region.numbers(mesh)
        if inside.shape[0] != vae.rows:
            raise ValueError(f"the region has {inside.shape[0]} rows of cells, and columns of the VAE {vae.rows}")
        self.inside = inside.T  # (columns, rows)
        outside = np.setdiff1d(np.arange(mesh.cells), inside)
        self.cells = outside if deviation is None else np.concatenate([outside, self.inside.flatten()])
        self.codes = self.inside.shape[0] * vae.codes
        count = self.codes + len(self.cells)
        place = sp.csr_array((np.ones(len(self.cells)), (self.cells, self.codes + np.arange(len(self.cells)))),
                             shape=(mesh.cells, count))  # fmt: skip
        self.place = place
        coded = np.zeros(mesh.cells, bool)
        coded[inside] = True
        across, below = neighbours(mesh)
        weights = [np.where(coded[pairs].all(0), price, pixels) for pairs, price in ((across, lateral), (below, 0.0))]
        self.rough = roughness(np.hstack([across, below]), np.concatenate(weights), np.where(coded, 0.0, 1e-3 * pixels))
        own = np.ones(count)
        own[self.codes :] = 0.0
        if deviation is not None:
            own[self.codes + len(outside) :] = deviation**-2
        self.own = own
        self.cap = torch.cat([torch.full((self.codes,), step), torch.full((len(self.cells),), 1.2)]).double()
        self.level = torch.zeros((), dtype=torch.float64)  # small pulls cells to where the inversion starts

    def start(self, model: Tensor) -> Tensor:
        """Cells of the region take the nearest codes."""
        flat = model.double().flatten()
        self.level = flat.mean()
        with torch.no_grad():
            codes = self.vae.encode(flat[self.inside].float()).double()
        cells = flat[self.cells].clone()
        if self.deviation is not None:
            cells[-self.inside.size :] = 0.0
        return torch.cat([codes.flatten(), cells])

    def _codes(self, p: Tensor) -> Tensor:
        return p[: self.codes].view(-1, self.vae.codes).float()

    def model(self, p: Tensor) -> Tensor:
        flat = torch.from_numpy(self.place @ p.numpy())
        with torch.no_grad():
            flat[self.inside] += self.vae.decode(self._codes(p)).double()
        return flat.view(self.mesh.shape)

    def linearize(self, p: Tensor) -> Local:
        decode = torch.func.vmap(torch.func.jacrev(lambda code: self.vae.decode(code[None])[0]))
        with torch.no_grad():
            each = decode(self._codes(p)).double().numpy()  # (columns, rows, codes)
        columns, _, codes = each.shape
        row = np.broadcast_to(self.inside[:, :, None], each.shape)
        column = np.broadcast_to(np.arange(columns * codes).reshape(columns, 1, codes), each.shape)
        jacobian = (
            sp.csr_array((each.flatten(), (row.flatten(), column.flatten())), shape=(self.mesh.cells, len(p)))
            + self.place
        )
        rough = self.rough @ jacobian
        matrix = sp.csc_array(rough.T @ rough + sp.diags_array(self.own + 1e-9))
        values = self.rough @ (self.model(p).flatten() - self.level).numpy()
        own = self.own * p.numpy()
        return Local(sp.csr_array(jacobian), matrix, rough.T @ values + own, float(values @ values + own @ p.numpy()))
