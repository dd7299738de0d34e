"""Write schnetpack.safetensors: weights of SchNetPack's SchNet and PaiNN, with their energies and forces.

Run it in an environment with torch, ase, safetensors and schnetpack 2.1.1 (installed with --no-deps; in
schnetpack/data/loader.py `T_co` has to be imported from typing_extensions), in this folder, with `src` and this folder
on the path:

    python make_schnetpack_fixture.py
"""

from __future__ import annotations

from pathlib import Path

import schnetpack as spk
import torch
from mol_structures import molecule
from safetensors.torch import save_file
from schnetpack.nn.activations import shifted_softplus

from tutti.science.mol.networks import pack

CUTOFF, FEATURES, GAUSSIANS, INTERACTIONS = 4.0, 12, 8, 2


def model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)  # SchNetPack's basis is made in no other
    radial, cut = spk.nn.GaussianRBF(GAUSSIANS, CUTOFF), spk.nn.CosineCutoff(CUTOFF)
    make, activation = {
        "schnet": (spk.representation.SchNet, shifted_softplus),
        "painn": (spk.representation.PaiNN, torch.nn.functional.silu),
    }[kind]
    potential = spk.model.NeuralNetworkPotential(
        make(FEATURES, INTERACTIONS, radial, cut),
        [spk.atomistic.PairwiseDistances()],
        [spk.atomistic.Atomwise(FEATURES, output_key="energy", activation=activation),
         spk.atomistic.Forces(energy_key="energy", force_key="forces")],
    )  # fmt: skip
    potential = potential.double()
    with torch.no_grad():
        radial.offsets.copy_(torch.linspace(0, CUTOFF, GAUSSIANS, dtype=torch.float64))
        radial.widths.fill_(CUTOFF / (GAUSSIANS - 1))
        for name, p in potential.named_parameters():
            p += 0.05 * torch.randn_like(p) if "bias" in name else 0
    return potential


def inputs() -> dict[str, torch.Tensor]:
    batch = pack([molecule(7, 1, CUTOFF), molecule(5, 2, CUTOFF), molecule(4, 3, CUTOFF, 3.6 * torch.eye(3), 3.0)])
    return {
        "_atomic_numbers": batch.species, "_positions": batch.positions, "_idx_i": batch.i, "_idx_j": batch.j,
        "_offsets": batch.offsets(), "_idx_m": batch.molecule, "_n_atoms": batch.sizes, "_cell": batch.cell,
    }  # fmt: skip


def main() -> None:
    tensors = {}
    for kind in ("schnet", "painn"):
        potential = model(kind)
        torch.set_default_dtype(torch.float64)  # of tensors that the models make
        outputs = potential(inputs())
        used = {
            name: x for name, x in potential.state_dict().items() if "radial_basis" not in name and "cutoff" not in name
        }
        used["representation.embedding.weight"] = used["representation.embedding.weight"][:10].clone()
        tensors |= {f"{kind}/weights/{name}": x.contiguous() for name, x in used.items()}
        tensors |= {f"{kind}/energy": outputs["energy"].detach(), f"{kind}/forces": outputs["forces"].detach()}
    save_file(tensors, Path(__file__).with_name("schnetpack.safetensors"))


if __name__ == "__main__":
    main()
