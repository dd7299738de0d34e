"""Training on energies and forces with `tutti.Trainer`.

loss = w_E mean((E' - E)^2 / atoms^2) + w_F mean((F' - F)^2) in the units of the data: means over all structures and all
components of a step, on however many devices. Forces are gradients by vectors between atoms, summed at both ends.

    result = fit(network, train, held_out, Training(steps=2000), folder="out/ethanol")
    print(result.errors)
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from tutti.launch.progress import progress
from tutti.science.mol.networks.batch import SPECIES, Structure, groups, pack
from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.ragged import sum_at
from tutti.science.mol.networks.rows import Limits, Rows


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    batch: structures of a step, about: steps have room for so many of mean size. rows: into which the structures of a
    step are packed, a multiple of the number of devices that share a step. energy_weight, force_weight: w_E and w_F.
    references: whether to fit references and scale to the data before training. every: steps between validations;
    0 for none but the last.
    """

    steps: int = 2000
    batch: int = 32
    rows: int = 1
    rate: float = 1e-3
    energy_weight: float = 1.0
    force_weight: float = 100.0
    references: bool = True
    every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "batch": 1, "rows": 1, "every": 0}.items():
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"{name} of the training: a whole number from {least} on, not {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate of the training: above 0, not {self.rate}")
        if min(self.energy_weight, self.force_weight) < 0 or not self.energy_weight + self.force_weight > 0:
            raise ValueError("energy_weight and force_weight: at least 0 and not both 0, not "
                             f"{self.energy_weight} and {self.force_weight}")  # fmt: skip


@dataclass(frozen=True)
class Errors:
    """Mean absolute and root-mean-square errors of the energy per atom, and of components of forces."""

    energy_mae: float
    energy_rmse: float
    force_mae: float
    force_rmse: float


@dataclass(frozen=True)
class Fit:
    """losses, validation: losses and validation errors by step. errors: errors of the held-out structures in the end,
    or None without any."""

    losses: dict[int, float]
    validation: dict[int, Errors] = field(default_factory=dict)
    errors: Errors | None = None


class Objective(nn.Module):
    """The loss of rows (`rows.row`), as the Trainer captures it."""

    def __init__(self, network: Network, energy_weight: float, force_weight: float) -> None:
        super().__init__()
        self.network, self.energy_weight, self.force_weight = network, energy_weight, force_weight

    def forward(self, species: Tensor, molecule: Tensor, i: Tensor, j: Tensor, vectors: Tensor, energy: Tensor,
                atoms: Tensor, forces: Tensor) -> dict[str, Tensor]:  # fmt: skip
        scale, real = self.network.scale.to(vectors.dtype), (species > 0).to(vectors.dtype)
        with torch.enable_grad():
            r = vectors.detach().requires_grad_(self.force_weight > 0)
            each = self.network.atomic(species, r, i, j) * scale * real
            total = sum_at(each, molecule, energy.shape[-1])
            loss = total.new_zeros(())
            if self.energy_weight:
                wrong = (total - energy) / atoms.clamp(min=1) * (atoms > 0)
                loss = loss + self.energy_weight * wrong.square().sum() / (atoms > 0).sum()
            if self.force_weight:
                (slope,) = torch.autograd.grad(total.sum(), r, create_graph=True)
                predicted = sum_at(slope, i, species.shape[-1]) - sum_at(slope, j, species.shape[-1])
                wrong = (predicted - forces) * real.unsqueeze(-1)
                loss = loss + self.force_weight * wrong.square().sum() / (3 * real.sum())
        return {"loss": loss}


def fit(network: Network, structures: Sequence[Structure], held_out: Sequence[Structure] = (),
        training: Training | None = None, *, folder: str | Path | None = None, resume: bool = False,
        after: Callable[[int, float], None] | None = None, **options: Any) -> Fit:  # fmt: skip
    """Train `network` in place. In a job of several processes every one calls it, and they share each step.
    The species of the structures are recorded in `network.seen_species`.

    held_out: structures for validation. folder: folder of the Trainer's checkpoints, which `save_steps=...` makes;
    resume: whether to continue from the newest there. after: called with steps and losses about twenty times. options:
    further fields of `tutti.TrainingArguments`, such as plan, level, ema_decay, lr_scheduler_type.

    Raises ValueError for structures without the targets that the weights ask for, if no structure has an edge, and for
    training that diverges.
    """
    how = training or Training()
    check_targets(structures, how)
    if not any(len(x.i) for x in structures):
        raise ValueError(
            f"no structure has an edge: all atoms are farther apart than the cutoff, which for the network is"
            f" {network.cutoff:g} in units {network.units!r} (lengths in 'eV' are in angstrom, in 'MD' in nm)"
        )
    from transformers.trainer_callback import PrinterCallback, TrainerCallback  # takes seconds to import

    from tutti.train.trainer.counting import Counting

    if how.references and not resume:
        fit_references(network, structures)
    for x in structures:
        network.seen_species[x.species] = True
    validation: dict[int, Errors] = {}
    logs = max(1, how.steps // 20)

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if how.every and held_out and state.global_step % how.every == 0 and state.global_step < how.steps:
                validation[state.global_step] = errors(network, held_out)

    with tempfile.TemporaryDirectory() as temporary, torch.random.fork_rng([]):
        chosen: dict[str, Any] = {
            "max_steps": how.steps, "learning_rate": how.rate, "global_batch_size": how.rows,
            "train_sampling_strategy": "sequential", "lr_scheduler_type": "cosine", "warmup_steps": how.steps // 20,
            "save_strategy": "steps" if "save_steps" in options else "no", "optim": "adamw_torch",
            "logging_steps": logs, "report_to": "none", "disable_tqdm": True, "seed": how.seed,
            "max_grad_norm": 0.0, "use_cpu": next(network.parameters()).device.type == "cpu",
        } | options  # fmt: skip
        each = -(-how.batch // how.rows)
        rows = Rows(structures, network, Limits.of(structures, each), how.steps * how.rows, how.seed)
        arguments = tutti.TrainingArguments(str(folder or temporary), **chosen)
        model = Objective(network, how.energy_weight, how.force_weight)
        trainer = tutti.Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        with progress("training a network") as tell:
            trainer.add_callback(Counting(tell.count, after))
            trainer.add_callback(Watch())
            trainer.train(resume_from_checkpoint=resume or None)
    losses = {int(x["step"]): x["loss"] for x in trainer.state.log_history if "loss" in x}
    if not all(math.isfinite(x) for x in losses.values()):
        raise ValueError(f"training diverged (losses {list(losses.values())}): lower the rate, {how.rate:g}")
    final_errors = errors(network, held_out) if held_out else None
    if final_errors:
        validation[how.steps] = final_errors
    return Fit(losses, validation, final_errors)


def fit_references(network: Network, structures: Sequence[Structure]) -> None:
    """References by least squares of energies on compositions; the scale is the RMS of forces, or of what is left of
    energies per root atom. Species that never occur have the reference 0."""
    count = torch.stack([torch.bincount(x.species, minlength=SPECIES) for x in structures]).double()
    seen = count.any(0).nonzero().flatten()
    energies = [x.energy for x in structures]
    scale = 1.0
    references = torch.zeros(len(seen), dtype=torch.float64)
    if all(x is not None for x in energies):
        e = torch.tensor([float(x) for x in energies if x is not None], dtype=torch.float64)
        design = count[:, seen]
        mean = (e / design.sum(1)).mean()  # directions that no composition tells apart share the mean
        references = mean + torch.linalg.lstsq(design, e - mean * design.sum(1), driver="gelsd").solution
        scale = float(((e - design @ references) / design.sum(1).sqrt()).square().mean().sqrt())
    forces = [x.forces for x in structures if x.forces is not None]
    if len(forces) == len(structures):
        scale = float(torch.cat(forces).double().square().mean().sqrt())
    if not scale > 1e-12:
        scale = 1.0
    network.set_references(dict(zip(seen.tolist(), references.tolist(), strict=True)), scale)


def errors(network: Network, structures: Sequence[Structure], atoms: int = 2000, edges: int = 100_000) -> Errors:
    """Errors over all structures, in batches of at most so many atoms and edges or one structure."""
    atoms = max(atoms, *(len(x.species) for x in structures))
    edges = max(edges, *(len(x.i) for x in structures))
    of_energy, of_force = [torch.empty(0)], [torch.empty(0)]
    for group in groups(structures, range(len(structures)), atoms, edges):
        batch = pack([structures[n] for n in group])
        energy, forces = network.energy_and_forces(batch)
        if batch.energy is not None:
            of_energy.append((energy - batch.energy) / batch.sizes)
        if batch.forces is not None:
            of_force.append((forces - batch.forces).flatten())
    e, f = torch.cat(of_energy).double(), torch.cat(of_force).double()
    return Errors(
        *(float(x) for x in (e.abs().mean(), e.square().mean().sqrt(), f.abs().mean(), f.square().mean().sqrt()))
    )


def check_targets(structures: Sequence[Structure], how: Training) -> None:
    if not structures:
        raise ValueError("fit: at least one structure to train on")
    for n, x in enumerate(structures):
        if how.energy_weight and x.energy is None:
            raise ValueError(f"structure {n} has no energy: give it one, or energy_weight=0")
        if how.force_weight and x.forces is None:
            raise ValueError(f"structure {n} has no forces: give it forces, or force_weight=0")
