"""SchNet with tabulated filters: schnet.cpp."""

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
from tutti.science.mol.networks.ragged import sum_at
from tutti.science.mol.networks.schnet import SchNet
from tutti.science.mol.networks.tables import Tables

PANEL = 64  # columns of weights beside each other: panels.h


@cache
def operator(name: str, dtype: torch.dtype) -> Any:
    """An operator of NAME.cpp."""
    real = "double" if dtype == torch.float64 else "float"
    source = "".join(Path(__file__).with_name(file).read_text() for file in ("panels.h", f"{name}.cpp"))
    return getattr(compat.compile_operators(f"#define REAL {real}\n{source}"), f"{name}_tabulated_{real}")


def padded(x: Tensor, dims: int = 1) -> Tensor:
    """Zeros at the ends of the last dims, up to a multiple of PANEL."""
    return pad(x, [n for d in range(1, dims + 1) for n in (0, -x.shape[-d] % PANEL)])


def panels(weight: Tensor) -> Tensor:
    """Weights (..., n, k) of a layer k -> n as (..., n / PANEL, k, PANEL)."""
    w = padded(weight, 2)
    return w.unflatten(-2, (-1, PANEL)).transpose(-1, -2)


class TabulatedSchNet:
    """See `tables.compile_for_md`."""

    def __init__(self, network: SchNet, tables: Tables, dtype: torch.dtype = torch.float32) -> None:
        self.cutoff, self.tables, self.dtype = network.cutoff, tables, dtype
        self.units, self.network = network.units, deepcopy(network)
        self.references, self.scale = network.references.clone(), float(network.scale)
        state = {name: x.detach().double().cpu() for name, x in network.state_dict().items()}

        def stacked(name: str) -> Tensor:
            return torch.stack([state[f"interactions.{k}.{name}"] for k in range(len(network.interactions))])

        inward, one, two = stacked("inward.weight"), stacked("outward.0.weight"), stacked("outward.2.weight")
        embedding, half = state["embedding.weight"], state["readout.0.weight"]
        made = [
            padded(embedding), padded(embedding @ inward[0].T), padded(tables.data),
            panels(inward), panels(inward.mT),
            panels(one), padded(stacked("outward.0.bias")), panels(one.mT),
            panels(two), padded(stacked("outward.2.bias")), panels(two.mT),
            panels(half), padded(state["readout.0.bias"]), panels(half.mT), padded(state["readout.2.weight"][0]),
        ]  # fmt: skip
        self.weights = [x.to(dtype).contiguous() for x in made]
        self.last = float(state["readout.2.bias"])
        self.kernel = operator("schnet", dtype)

    def energy_and_forces(self, batch: Batch) -> tuple[Tensor, Tensor]:
        energy, forces, _ = self.evaluate(batch)
        return energy, forces

    def evaluate(self, batch: Batch, half: bool = False, virial: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        offsets = batch.offsets().double() if batch.cell is not None else None
        atoms, forces, virials = self.kernel(
            batch.positions.detach().double().contiguous(), batch.species, batch.molecule, batch.i, batch.j, offsets,
            batch.count, self.weights, self.last, self.cutoff, half, True, virial,
        )  # fmt: skip
        each = atoms * self.scale + self.references.index_select(0, batch.species)
        if self.scale != 1:
            forces.mul_(self.scale)
            virials.mul_(self.scale)
        return sum_at(each, batch.molecule, batch.count), forces, virials if virial else None
