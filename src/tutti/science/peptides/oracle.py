"""A learned oracle: it predicts a label or a score of peptides, with its uncertainty, and refuses to extrapolate.

An ensemble of small networks reads features of a peptide: fractions of the 20 residues, fractions of pairs of residue
classes at distances of 1, 3 and 4 (neighbours along the chain and around a helix), and the properties of
`tutti.science.peptides.properties`. Each member learns from a bootstrap sample of clusters of similar peptides; what it
did not learn from calibrates the ensemble ("out of bag", Breiman 1996): labels by Platt's scaling (Platt 1999) of the
mean logit, scores by a conformal factor on the standard deviation (Lei et al. 2018).

The domain of applicability is as Sahigara et al. 2012 have it: within the lengths that were learned, and as near to
peptides that were learned, in residue fractions and properties, as 99 % of these are to those of other clusters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from tutti.checkpoint.tensor_file import read_tensors, write_tensors
from tutti.models.peptides import RESIDUES
from tutti.science.peptides.properties import PROPERTIES, counts, encode, properties
from tutti.whole_files import write_text

__all__ = ["Oracle", "Prediction"]

CLASSES = ("AILMV", "FWY", "HKR", "DE", "NQST", "CGP")
DISTANCES = (1, 3, 4)
MEMBERS, HIDDEN, STEPS = 8, 32, 100
NEIGHBORS, WITHIN = 5, 0.99
COVERAGE = 0.9


def features(peptides: Sequence[str]) -> np.ndarray:
    """(peptides, 134) float64: 20 residue fractions, 6 properties, 3 x 36 fractions of pairs of classes."""
    codes = encode(peptides)
    which = np.array([next(i for i, x in enumerate(CLASSES) if r in x) for r in RESIDUES])
    groups = np.where(codes >= 0, which[codes], -1)
    columns = [_composition(peptides)]
    for distance in DISTANCES:
        first, second = groups[:, :-distance], groups[:, distance:]
        pair = np.where((first >= 0) & (second >= 0), first * len(CLASSES) + second, -1)
        total = np.maximum((pair >= 0).sum(1), 1)
        columns.append(np.stack([(pair == i).sum(1) / total for i in range(len(CLASSES) ** 2)], 1))
    return np.concatenate(columns, 1)


def _composition(peptides: Sequence[str]) -> np.ndarray:
    """(peptides, 26): residue fractions and properties, in which the domain is measured."""
    residues = counts(peptides)
    return np.concatenate([residues / residues.sum(1, keepdims=True),
                           np.stack(list(properties(peptides).values()), 1)], 1)  # fmt: skip


DOMAIN = 20 + len(PROPERTIES)  # first columns of the features


@dataclass(frozen=True)
class Prediction:
    """Predictions for peptides, (peptides,) each.

    mean: probability of the label 1, or the score. spread: standard deviation over members, of the probability or of
    the score. low, high: interval that should hold 90 % of scores; for labels, the range of the members' probabilities.
    inside: whether the oracle is applicable. Elsewhere the others are NaN.
    """

    mean: np.ndarray
    spread: np.ndarray
    low: np.ndarray
    high: np.ndarray
    inside: np.ndarray


class Oracle:
    """Fit it by `Oracle.fit`. `binary`: whether it predicts a label rather than a score."""

    def __init__(self, binary: bool, tensors: dict[str, Tensor], lengths: tuple[int, int], numbers: dict[str, float]):
        self.binary, self.tensors, self.lengths, self.numbers = binary, tensors, lengths, numbers

    @classmethod
    def fit(cls, peptides: Sequence[str], targets: np.ndarray, groups: np.ndarray, seed: int = 0) -> Oracle:
        """Learn from peptides, their labels (0 and 1 only) or scores, and the clusters they are in.

        Raises ValueError for fewer than 50 peptides, targets that are all equal or not finite.
        """
        targets = np.asarray(targets, float)
        if len(peptides) < 50 or len(set(groups.tolist())) < 10:
            raise ValueError(f"{len(peptides)} peptides in {len(set(groups.tolist()))} clusters are too few for an "
                             "oracle; 50 in 10 are the least")  # fmt: skip
        if not np.isfinite(targets).all() or (targets == targets[0]).all():
            raise ValueError("targets of an oracle should be finite and differ; remove the label, or give other data")
        binary = set(np.unique(targets)) <= {0.0, 1.0}
        x = features(peptides)
        center, scale = x.mean(0), x.std(0)
        scale[scale < 1e-9] = 1.0
        middle, width = (0.0, 1.0) if binary else (float(targets.mean()), float(targets.std()))
        rows = torch.tensor((x - center) / scale, dtype=torch.float32)
        aims = torch.tensor((targets - middle) / width, dtype=torch.float32)
        weights = _bootstrap(groups, MEMBERS, seed)
        layers = _train(rows, aims, weights, binary, seed)
        tensors = {**layers, "center": torch.tensor(center), "scale": torch.tensor(scale)}
        tensors["near"] = rows[:, :DOMAIN].clone()
        outputs = _forward(rows, layers).numpy().astype(float)
        out = weights == 0  # (members, rows): rows that a member did not learn from
        seen = out.any(0)
        mean = (outputs * out).sum(0)[seen] / out.sum(0)[seen]
        numbers = {"middle": middle, "width": width}
        if binary:
            numbers["slope"], numbers["offset"] = _platt(mean, targets[seen])
        else:
            numbers |= _conformal(outputs, out, aims.numpy().astype(float))
        distances = _distances(tensors["near"], tensors["near"], groups)
        numbers["distance"] = float(np.quantile(distances[np.isfinite(distances)], WITHIN))
        sizes = [len(p) for p in peptides]
        return cls(binary, tensors, (min(sizes), max(sizes)), numbers)

    def inside(self, peptides: Sequence[str]) -> np.ndarray:
        """(peptides,) bool: whether the oracle is applicable."""
        return self._inside(peptides, self._rows(peptides))

    def _rows(self, peptides: Sequence[str]) -> Tensor:
        x = torch.tensor(features(peptides))
        return ((x - self.tensors["center"]) / self.tensors["scale"]).float()

    def _inside(self, peptides: Sequence[str], rows: Tensor) -> np.ndarray:
        sizes = np.array([len(x) for x in peptides])
        near = _distances(rows[:, :DOMAIN], self.tensors["near"]) <= self.numbers["distance"]
        return near & (sizes >= self.lengths[0]) & (sizes <= self.lengths[1])

    def predict(self, peptides: Sequence[str], strict: bool = False) -> Prediction:
        """Predict with uncertainty. strict: raise ValueError for peptides outside of the domain."""
        if not len(peptides):
            empty = np.zeros(0)
            return Prediction(empty, empty, empty, empty, np.zeros(0, bool))
        rows, n = self._rows(peptides), self.numbers
        inside = self._inside(peptides, rows)
        if strict and not inside.all():
            first = peptides[int(np.argmin(inside))]
            raise ValueError(f"{(~inside).sum()} of {len(peptides)} peptides are outside of the oracle's domain, first "
                             f"{first}: it learned from other lengths or compositions")  # fmt: skip
        outputs = _forward(rows, self.tensors).numpy().astype(float)
        if self.binary:
            each = 1 / (1 + np.exp(-(n["slope"] * outputs + n["offset"])))
            mean = 1 / (1 + np.exp(-(n["slope"] * outputs.mean(0) + n["offset"])))
            low, high, spread = each.min(0), each.max(0), each.std(0)
        else:
            mean = n["middle"] + n["width"] * outputs.mean(0)
            spread = n["width"] * np.sqrt(outputs.var(0) + n["residual"])
            low, high = mean - n["factor"] * spread, mean + n["factor"] * spread
        mean, spread, low, high = (np.where(inside, x, np.nan) for x in (mean, spread, low, high))
        return Prediction(mean, spread, low, high, inside)

    def save(self, folder: Path) -> None:
        """Write oracle.safetensors and oracle.json into a folder."""
        write_tensors(self.tensors, folder / "oracle.safetensors")
        table = {"binary": self.binary, "lengths": self.lengths, "numbers": self.numbers}
        write_text(folder / "oracle.json", json.dumps(table, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Oracle:
        """Read what `save` wrote."""
        table = json.loads((folder / "oracle.json").read_text("utf-8"))
        tensors = read_tensors(folder / "oracle.safetensors", unsigned=True)
        return cls(table["binary"], tensors, tuple(table["lengths"]), table["numbers"])


def _bootstrap(groups: np.ndarray, members: int, seed: int) -> np.ndarray:
    """(members, rows) how often a row's cluster was drawn, with replacement."""
    draw, (_, index) = np.random.default_rng(seed), np.unique(groups, return_inverse=True)
    size = int(index.max()) + 1
    return np.stack([np.bincount(draw.integers(0, size, size), minlength=size)[index] for _ in range(members)])


def _train(rows: Tensor, aims: Tensor, weights: np.ndarray, binary: bool, seed: int) -> dict[str, Tensor]:
    """Weights of all members, trained side by side on all rows at once."""
    draw = torch.Generator().manual_seed(seed)
    members, width = len(weights), rows.shape[1]
    layers = {
        "first": torch.randn(members, width, HIDDEN, generator=draw) / math.sqrt(width),
        "bias": torch.zeros(members, 1, HIDDEN),
        "second": torch.randn(members, HIDDEN, 1, generator=draw) / math.sqrt(HIDDEN),
        "shift": torch.zeros(members, 1, 1),
    }
    parameters = [x.requires_grad_() for x in layers.values()]
    optimizer = torch.optim.AdamW(parameters, 3e-3, weight_decay=3.0)
    share = torch.tensor(weights / weights.sum(1, keepdims=True), dtype=torch.float32)
    loss = nn.functional.binary_cross_entropy_with_logits if binary else nn.functional.mse_loss
    aims = aims.expand(members, -1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss(_forward(rows, layers), aims, reduction="none") * share).sum().backward()
        optimizer.step()
    return {name: x.detach() for name, x in layers.items()}


def _forward(rows: Tensor, layers: dict[str, Tensor]) -> Tensor:
    """(members, rows) logits or standardized scores."""
    hidden = torch.relu(rows @ layers["first"] + layers["bias"])
    return (hidden @ layers["second"] + layers["shift"]).squeeze(2)


def _platt(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Slope and offset of the logits that make the labels most likely."""

    def loss(x: np.ndarray) -> float:
        z = x[0] * logits + x[1]
        return float(np.mean(np.logaddexp(0, z) - labels * z))

    slope, offset = minimize(loss, np.array([1.0, 0.0]), method="BFGS").x
    return float(slope), float(offset)


def _conformal(outputs: np.ndarray, out: np.ndarray, aims: np.ndarray) -> dict[str, float]:
    """The variance of residuals beyond that of members, and the factor on the sum's root that covers `COVERAGE`."""
    rows = out.sum(0) >= 2
    count = out.sum(0)[rows]
    mean = (outputs * out).sum(0)[rows] / count
    variance = (((outputs[:, rows] - mean) * out[:, rows]) ** 2).sum(0) / count
    error = aims[rows] - mean
    residual = max(float(np.mean(error**2 - variance)), 1e-6)
    factor = float(np.quantile(np.abs(error) / np.sqrt(variance + residual), COVERAGE))
    return {"residual": residual, "factor": factor}


def _distances(queries: Tensor, references: Tensor, groups: np.ndarray | None = None) -> np.ndarray:
    """(queries,) mean distance to the nearest references; with groups of both, only to those of other groups."""
    means = []
    labels = None if groups is None else torch.tensor(groups)
    for first in range(0, len(queries), 1024):
        block = torch.cdist(queries[first : first + 1024], references)
        if labels is not None:
            block[labels[first : first + 1024, None] == labels] = torch.inf
        means.append(block.topk(min(NEIGHBORS, block.shape[1]), 1, largest=False).values.mean(1))
    return torch.cat(means).numpy().astype(float)
