"""What kernels with tabulated filters share: weights in panels, calls, scale and references."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tutti import compat
from tutti.science.mol.networks.batch import Batch
from tutti.science.mol.networks.fast.tables import Tables
from tutti.science.mol.networks.network import Network

PANEL = 64  # columns of weights beside each other: panels.h
REALS = {torch.float32: "float", torch.float64: "double"}
FILES = ("panels.h", "graph.h", "schnet.cpp", "painn.cpp")


@cache
def library(dtype: torch.dtype) -> Any:
    """The operators of all kernels, which are compiled together: most of the time goes into headers of torch."""
    source = "".join(Path(__file__).with_name(file).read_text() for file in FILES)
    return compat.compile_operators(f"#define REAL {REALS[dtype]}\n{source}")


def padded(x: Tensor, dims: int = 1) -> Tensor:
    """Zeros at the ends of the last dims, up to a multiple of PANEL."""
    return pad(x, [n for d in range(1, dims + 1) for n in (0, -x.shape[-d] % PANEL)])


def panels(weight: Tensor) -> Tensor:
    """Weights (..., n, k) of a layer k -> n as (..., n / PANEL, k, PANEL)."""
    w = padded(weight, 2)
    return w.unflatten(-2, (-1, PANEL)).transpose(-1, -2)


class Tabulated:
    """See `tables.compile_for_md`. Subclasses name their kernel and lay out the weights for it."""

    name: str

    def __init__(self, network: Network, tables: Tables, dtype: torch.dtype = torch.float32) -> None:
        self.cutoff, self.tables, self.dtype = network.cutoff, tables, dtype
        self.units, self.network = network.units, deepcopy(network)
        self.references, self.scale = network.references.clone(), float(network.scale)
        state = {name: x.detach().double().cpu() for name, x in network.state_dict().items()}
        self.weights = [x.to(dtype).contiguous() for x in self.layout(state, tables.data)]
        self.last = float(state["readout.2.bias"])
        self.kernel = getattr(library(dtype), f"{self.name}_tabulated_{REALS[dtype]}")

    def layout(self, state: dict[str, Tensor], tables: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def energy_and_forces(self, batch: Batch) -> tuple[Tensor, Tensor]:
        energy, forces, _ = self.evaluate(batch)
        return energy, forces

    def evaluate(self, batch: Batch, half: bool = False, virial: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        offsets = batch.offsets().double() if batch.cell is not None else None
        atoms, forces, virials = self.kernel(
            batch.positions.detach().double().contiguous(), batch.species, batch.molecule, batch.i, batch.j, offsets,
            batch.count, self.weights, self.last, self.cutoff, half, virial,
            len(batch.species) if batch.counted is None else batch.counted,
        )  # fmt: skip
        each = atoms * self.scale + self.references.index_select(0, batch.species)
        if self.scale != 1:
            forces.mul_(self.scale)
            virials.mul_(self.scale)
        return batch.sum(each), forces, virials if virial else None


def stacked(state: dict[str, Tensor], part: str, name: str) -> Tensor:
    """PART.0.NAME, PART.1.NAME, ... as one tensor."""
    tensors = []
    while (x := state.get(f"{part}.{len(tensors)}.{name}")) is not None:
        tensors.append(x)
    return torch.stack(tensors)
