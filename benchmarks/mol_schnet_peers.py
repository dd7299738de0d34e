"""Peers of `mol_schnet.py`: energies and forces of aspirin, in an environment of its own (`harness.Beside`).

    python mol_schnet_peers.py LIBRARY FOLDER

SchNetPack writes its weights and forces to FOLDER, from which the others take them. Each line of JSON on stdin,
[kind, interactions, structures, threads, calls], is answered with the seconds of each call, or, without calls, with the
relative errors of forces against SchNetPack's in float64.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FEATURES, CUTOFF = 128, 5.0
GAUSSIANS = {"schnet": 50, "painn": 20}
NETWORKS = (("schnet", 3), ("schnet", 6), ("painn", 3))
ASPIRIN = """
O 1.2333 0.5540 0.7792|O -0.6952 -2.7148 -0.7502|O 0.7958 -2.1843 0.8685|O 1.7813 0.8105 -1.4821
C -0.0857 0.6088 0.4403|C -0.7927 -0.5515 0.1244|C -0.7288 1.8464 0.4133|C -2.1426 -0.4741 -0.2184
C -2.0787 1.9238 0.0706|C -2.7855 0.7636 -0.2453|C -0.1409 -1.8536 0.1477|C 2.1094 0.6715 -0.3113
C 3.5305 0.5996 0.1635|H -0.1851 2.7545 0.6593|H -2.7247 -1.3605 -0.4564|H -2.5797 2.8872 0.0506
H -3.8374 0.8238 -0.5090|H 3.7290 1.4184 0.8593|H 4.2045 0.6969 -0.6924|H 3.7105 -0.3659 0.6426
H -0.2555 -3.5916 -0.7337"""
Forces = Callable[[], Tensor]


@cache
def batch(count: int):
    """Structures whose atoms are moved at random by 0.05 angstrom a coordinate."""
    from tutti.science.mol.networks import Structure, pack

    rows = [row.split() for row in ASPIRIN.replace("\n", "|").strip("|").split("|")]
    species = torch.tensor([{"H": 1, "C": 6, "O": 8}[row[0]] for row in rows])
    still = torch.tensor([[float(x) for x in row[1:]] for row in rows], dtype=torch.float64)
    draw, structures = torch.Generator().manual_seed(0), []
    for _ in range(count):
        x = still + 0.05 * torch.randn(still.shape, generator=draw, dtype=torch.float64)
        near = torch.cdist(x, x) < CUTOFF
        structures.append(Structure(species, x, *near.fill_diagonal_(False).nonzero(as_tuple=True)))
    return pack(structures)


class SchNetPack:
    def __init__(self, folder: Path) -> None:
        import typing

        from torch.utils.data import dataloader

        if not hasattr(dataloader, "T_co"):  # which SchNetPack 2.1.1 imports from there
            dataloader.T_co = typing.TypeVar("T_co", covariant=True)  # pyright: ignore
        self.models = {key: self._model(*key) for key in NETWORKS}
        for (kind, n), model in self.models.items():
            state = {k: x.contiguous() for k, x in model.state_dict().items()}
            save_file(state, folder / f"weights-{kind}-{n}.safetensors")
            for count in (1, 64):
                forces = self._forces(model.double(), count)()
                save_file({"forces": forces}, folder / f"forces-{kind}-{n}-{count}.safetensors")
            model.float()

    def _model(self, kind: str, interactions: int) -> torch.nn.Module:
        import schnetpack as spk  # pyright: ignore[reportMissingImports]

        torch.manual_seed(interactions)
        network_class, activation = {
            "schnet": (spk.representation.SchNet, spk.nn.activations.shifted_softplus),
            "painn": (spk.representation.PaiNN, torch.nn.functional.silu),
        }[kind]
        radial, cut = spk.nn.GaussianRBF(GAUSSIANS[kind], CUTOFF), spk.nn.CosineCutoff(CUTOFF)
        representation = network_class(FEATURES, interactions, radial, cut)
        return spk.model.NeuralNetworkPotential(
            representation, [spk.atomistic.PairwiseDistances()],
            [spk.atomistic.Atomwise(FEATURES, output_key="energy", activation=activation),
             spk.atomistic.Forces(energy_key="energy", force_key="forces")],
        ).eval()  # fmt: skip

    def _forces(self, model: torch.nn.Module, count: int) -> Forces:
        x, dtype = batch(count), next(model.parameters()).dtype
        inputs = {
            "_atomic_numbers": x.species, "_idx_i": x.i, "_idx_j": x.j, "_idx_m": x.molecule, "_n_atoms": x.sizes,
            "_offsets": torch.zeros(len(x.i), 3, dtype=dtype), "_cell": torch.zeros(count, 3, 3, dtype=dtype),
        }  # fmt: skip
        positions = x.positions.to(dtype)

        def forces() -> Tensor:
            return model({**inputs, "_positions": positions.clone()})["forces"].detach()

        return forces

    def __call__(self, kind: str, interactions: int, count: int) -> Forces:
        return self._forces(self.models[kind, interactions], count)


class Ours:
    def __init__(self, folder: Path) -> None:
        from tutti.science.mol.networks import PaiNN, SchNet, from_schnetpack

        kinds = {"schnet": SchNet, "painn": PaiNN}
        self.networks = {(kind, n): kinds[kind](FEATURES, n, GAUSSIANS[kind], CUTOFF) for kind, n in NETWORKS}
        for (kind, n), network in self.networks.items():
            weights = load_file(folder / f"weights-{kind}-{n}.safetensors")
            network.load_state_dict(from_schnetpack(network, weights))

    def network(self, kind: str, interactions: int):
        return self.networks[kind, interactions]

    def __call__(self, kind: str, interactions: int, count: int) -> Forces:
        network, x = self.network(kind, interactions), batch(count)
        return lambda: network.energy_and_forces(x)[1]


class Tables(Ours):
    @cache  # noqa: B019
    def network(self, kind: str, interactions: int):
        from tutti.science.mol.networks import compile_for_md

        return compile_for_md(self.networks[kind, interactions])


LIBRARIES = {"schnetpack": SchNetPack, "plain": Ours, "tables": Tables}


def main(library: str, folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    forces_of = LIBRARIES[library](Path(folder))
    cache: dict[tuple[str, int, int], Forces] = {}
    for line in sys.stdin:
        kind, interactions, count, threads, calls = json.loads(line)
        torch.set_num_threads(threads)
        key = kind, interactions, count
        forces = cache.setdefault(key, cache.get(key) or forces_of(*key))
        answer = []
        for _ in range(calls):
            begin = time.perf_counter()
            forces()
            answer.append(time.perf_counter() - begin)
        if not calls:
            exact = load_file(Path(folder) / f"forces-{kind}-{interactions}-{count}.safetensors")["forces"]
            answer = [float((forces() - exact).norm() / exact.norm()), len(batch(count).i) / count]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
