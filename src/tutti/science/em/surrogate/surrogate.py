"""A surrogate of a solver: S-parameters with an error bound, and the solver itself where the bound is too large.

Curves are coefficients of a basis of singular vectors; an ensemble of networks predicts these from the parameters, and
the mean of the ensemble is made passive. The bound is split-conformal (V. Vovk et al., Algorithmic Learning in a Random
World, 2005; J. Lei et al., J. Am. Stat. Assoc. 113, 1094, 2018): on samples that no network has seen, the quantile
ceil((n + 1) coverage) / n of error / (spread + floor); error: relative L2 of the curve, spread: root mean square
distance of members from their mean, relative too. For new points drawn like those the bound holds with a probability
of at least `coverage`; as floor is half the median spread of the same samples, that is so but for a small part. The
best of many points by a figure of their predictions is not drawn like those: solve it.
"""

from __future__ import annotations

import math
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tutti
from tutti.checkpoint.values import read_values, write_values
from tutti.hardware.threads import threads
from tutti.launch.progress import progress
from tutti.science.em.bounds import check_kind, check_whole
from tutti.science.em.descent import check_rate
from tutti.science.em.shown import Brief, brief
from tutti.science.em.surrogate.curves import REPRESENTATIONS, Basis, passive
from tutti.science.em.surrogate.geometry import Geometry, relative_error
from tutti.science.em.surrogate.network import Ensemble
from tutti.science.em.surrogate.samples import Samples

LEAST = 10  # samples


@dataclass(frozen=True, repr=False)
class Prediction(Brief):
    """s: complex128 (n, traces, frequencies). bound: upper bound of the relative L2 error of each curve (n,).

    trusted: whether a point lies in the ranges and its bound below the tolerance (n,). solved: whether `s` is the
    solver's (n,); its bound is then 0.
    """

    s: Tensor
    bound: Tensor
    trusted: Tensor
    solved: Tensor


@dataclass(frozen=True)
class Training:
    """How networks are trained. calibration_fraction: fraction of the samples that calibrate the bound.

    members: networks, at least two; the bound is their spread. modes: singular vectors of curves, at most. bagged: each
    member learns a bootstrap sample of its own.
    """

    members: int = 5
    width: int = 128
    blocks: int = 2
    steps: int = 3000
    batch: int = 64
    rate: float = 3e-3
    calibration_fraction: float = 0.2
    modes: int = 48
    bagged: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("the training", 2, members=self.members)
        check_whole("the training", width=self.width, steps=self.steps, batch=self.batch, modes=self.modes)
        check_whole("the training", 0, blocks=self.blocks)
        check_rate(self.rate)
        if not 0 < self.calibration_fraction < 1:
            raise ValueError(
                f"calibration_fraction of the training: a fraction between 0 and 1, not {self.calibration_fraction}"
            )


class Surrogate:
    """A fast model of a geometry, fitted to samples. tolerance: the largest bound that is trusted. coverage:
    probability with which the bound holds."""

    def __init__(self, geometry: Geometry, basis: Basis, network: Ensemble, scale: float, floor: float,
                 tolerance: float = 0.05, coverage: float = 0.9) -> None:  # fmt: skip
        check_tolerance(tolerance)
        self.geometry, self.basis, self.network = geometry, basis, network.eval()
        self.scale, self.floor = scale, floor
        self.tolerance, self.coverage = tolerance, coverage

    def __repr__(self) -> str:
        return (f"Surrogate({self.geometry.name}, S: (n, {', '.join(map(str, self.geometry.shape))}), "
                f"{self.network.members} members, {len(self.basis.scale)} modes, tolerance={self.tolerance:g}, "
                f"coverage={self.coverage:g})")  # fmt: skip

    @staticmethod
    def fit(geometry: Geometry, samples: Samples, training: Training | None = None, *,
            calibration: Samples | None = None, tolerance: float = 0.05, coverage: float = 0.9,
            folder: str | Path | None = None, after: Callable[[int, float], None] | None = None,
            **options: Any) -> Surrogate:  # fmt: skip
        """Train the ensemble with `tutti.Trainer` and calibrate its bound. Shows progress on a terminal.

        calibration: samples for the bound; by default a fraction of `samples` is held out. folder: folder of the
        Trainer's files; by default they are temporary. after: called with steps and their mean loss about twenty times.
        options: further fields of `tutti.TrainingArguments`.
        Raises ValueError for samples that do not fit the geometry, too few to calibrate, and points of both kinds.
        """
        how = training or Training()
        check_tolerance(tolerance)
        check_kind("geometry", geometry, Geometry)
        check_kind("training", how, Training)
        check_kind("samples", samples, Samples)
        if calibration is not None:
            check_kind("calibration", calibration, Samples)
        samples.check(geometry, LEAST)
        seen, unseen = samples, calibration
        if unseen is None:
            order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(how.seed))
            calibrating = max(1, round(how.calibration_fraction * len(samples)))
            seen, unseen = samples[order[calibrating:]], samples[order[:calibrating]]
        unseen.check(geometry)
        number = rank(len(unseen), coverage)
        if bool((seen.points[:, None] == unseen.points).all(2).any()):
            raise ValueError("calibration: samples that the networks do not learn, but some points are in both")
        basis = Basis.of(seen.s, geometry.representation, most=how.modes)
        with tempfile.TemporaryDirectory() as temporary:
            network = trained(geometry, seen, basis, how, folder or temporary, after, options)
        surrogate = Surrogate(geometry, basis, network, 1.0, 0.0, tolerance, coverage)
        s, spread = surrogate.curves(unseen.points)
        surrogate.floor = 0.5 * float(spread.median())
        scores = relative_error(s, unseen.s) / (spread + surrogate.floor)
        surrogate.scale = float(scores.sort().values[number - 1])
        return surrogate

    @torch.no_grad()
    def curves(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Mean curves (n, traces, frequencies), passive, and the relative spread of members (n,)."""
        coefficients = self.network.coefficients(self.geometry.space.unit(points).float())
        s = passive(self.basis.decode(coefficients.double().mean(0)))
        away = (passive(self.basis.decode(coefficients)) - s).flatten(2).norm(dim=2).square().mean(0).sqrt()
        return s, away / s.flatten(1).norm(dim=1).clamp(min=1e-12)

    def predict(self, points: Tensor | Mapping[str, float] | Sequence[float]) -> Prediction:
        """S and bounds. Points out of the ranges have the bound inf. Raises ValueError for NaN."""
        x = self.geometry.space.points(points)
        s, spread = self.curves(x)
        bound = torch.where(self.geometry.space.inside(x), self.scale * (spread + self.floor), math.inf)
        return Prediction(s, bound, bound <= self.tolerance, torch.zeros(len(x), dtype=torch.bool))

    def solve(self, points: Tensor | Mapping[str, float] | Sequence[float]) -> Prediction:
        """As `predict`, but points that are not trusted are solved."""
        x = self.geometry.space.points(points)
        predicted = self.predict(x)
        s, bound = predicted.s.clone(), predicted.bound.clone()
        for i in (~predicted.trusted).nonzero().flatten().tolist():
            s[i], bound[i] = self.geometry.solved(x[i]), 0.0
        return Prediction(s, bound, torch.ones_like(predicted.trusted), ~predicted.trusted)

    def save(self, path: str | Path) -> None:
        """Save all but the geometry."""
        network = self.network
        write_values({
            **facts(self.geometry), "form": self.basis.form.facts(),
            "basis": (self.basis.mean, self.basis.vectors, self.basis.scale),
            "sizes": (network.members, network.first.weight.shape[1], network.first.weight.shape[2],
                      len(network.blocks) // 2),
            "state": network.state_dict(), "scale": self.scale, "floor": self.floor,
            "tolerance": self.tolerance, "coverage": self.coverage,
        }, path)  # fmt: skip

    @staticmethod
    def load(path: str | Path, geometry: Geometry) -> Surrogate:
        """Raises ValueError for a file of another geometry: all is compared but `solve`, which `name` stands for; and
        for a file that `save` has not written; FileNotFoundError without one."""
        if not isinstance(geometry, Geometry):
            raise ValueError(f"geometry: the one that {path} is a surrogate of, not {reprlib.repr(geometry)}")
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            saved = read_values(path)
        except ValueError as error:
            raise ValueError(f"{path} is no surrogate that `Surrogate.save` wrote: {error}") from None
        if not isinstance(saved, dict) or not {"geometry", "basis", "sizes", "scale"} <= saved.keys():
            raise ValueError(f"{path} is no surrogate that `Surrogate.save` wrote: it holds {brief(saved)}")
        for what, ours in facts(geometry).items():
            if saved.get(what) != ours:
                raise ValueError(f"{path} is a surrogate of {saved['geometry']} with {what} = "
                                 f"{reprlib.repr(saved.get(what))}, not {reprlib.repr(ours)}")  # fmt: skip
        members, inputs, width, blocks = saved["sizes"]
        network = Ensemble(members, inputs, saved["state"]["weight"], width, blocks)
        network.load_state_dict(saved["state"])
        form = REPRESENTATIONS[geometry.representation](**saved["form"])
        return Surrogate(geometry, Basis(form, *saved["basis"]), network, saved["scale"], saved["floor"],
                         saved["tolerance"], saved["coverage"])  # fmt: skip


def check_tolerance(tolerance: float) -> None:
    if not tolerance >= 0:
        raise ValueError(f"tolerance: the largest bound that is trusted, at least 0, not {tolerance}")


def rank(count: int, coverage: float) -> int:
    """Which of `count` sorted scores is the bound's. Raises ValueError for too few of them."""
    if not 0 < coverage < 1:
        raise ValueError(f"coverage: between 0 and 1, not {coverage}")
    order = math.ceil((count + 1) * coverage - 1e-9)
    if order > count:
        least = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise ValueError(f"{count} samples cannot calibrate a bound with a coverage of {coverage:g}: hold out at least "
                         f"{least}, or lower the coverage")  # fmt: skip
    return order


def facts(geometry: Geometry) -> dict[str, Any]:
    """What a surrogate depends on beside the solver."""
    space = geometry.space
    return {"geometry": geometry.name, "names": space.names, "low": space.low.tolist(), "high": space.high.tolist(),
            "traces": geometry.traces, "frequencies": geometry.frequencies.tolist(),
            "representation": geometry.representation}  # fmt: skip


def trained(geometry: Geometry, samples: Samples, basis: Basis, how: Training, folder: str | Path,
            after: Callable[[int, float], None] | None, options: Mapping[str, Any]) -> Ensemble:  # fmt: skip
    """An ensemble, trained on samples by `tutti.Trainer`."""
    from transformers.trainer_callback import PrinterCallback  # seconds, which processes that solve need not wait for

    from tutti.train.trainer.counting import Counting

    inputs, labels = geometry.space.unit(samples.points).float(), basis.encode(samples.s).float()
    draw = torch.Generator().manual_seed(how.seed)
    counts = torch.ones(len(samples), how.members)
    if how.bagged:
        picks = torch.randint(len(samples), (how.members, len(samples)), generator=draw)
        counts = torch.stack([torch.bincount(x, minlength=len(samples)) for x in picks], 1).float()
    rows = [{"parameters": x, "labels": y, "counts": c} for x, y, c in zip(inputs, labels, counts, strict=True)]
    weight = basis.scale.square() / basis.scale.square().sum()
    with torch.random.fork_rng([]):
        torch.manual_seed(how.seed)
        network = Ensemble(how.members, inputs.shape[1], weight, how.width, how.blocks)
        defaults: dict[str, Any] = {
            "max_steps": how.steps, "learning_rate": how.rate, "per_device_train_batch_size": min(how.batch, len(rows)),
            "lr_scheduler_type": "cosine", "warmup_steps": how.steps // 20, "save_strategy": "no",
            "optim": "adamw_torch", "logging_steps": max(1, how.steps // 20), "report_to": "none", "disable_tqdm": True,
            "use_cpu": True, "dataloader_drop_last": True, "plan": "single", "cluster": "auto", "level": "O0",
            "seed": how.seed,
        }  # fmt: skip
        arguments = tutti.TrainingArguments(str(folder), **(defaults | dict(options)))
        trainer = tutti.Trainer(network, arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        with threads(1), progress(f"training a surrogate of {geometry.name}") as tell:  # layers are small
            trainer.add_callback(Counting(tell.count, after))
            trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    if not all(math.isfinite(x) for x in losses):
        raise ValueError(f"training diverged ({losses}): lower the rate, {how.rate:g}")
    return network
