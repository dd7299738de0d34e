"""The Frechet distance between two sets of features; with those of Inception it is FID (Heusel et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


class Features:
    """Mean and covariance of features, in float64, collected batch by batch.

        real, made = (Features.of(extractor, loader) for loader in (photographs, samples))
        real.distance(made)

    The extractor may be any network. Numbers are comparable only between runs with the same one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = np.zeros(())
        self._scatter = np.zeros(())  # sum of outer products of deviations

    @classmethod
    def of(cls, extractor: Callable[[T], Tensor], batches: Iterable[T]) -> Features:
        """The features (rows, ...) that an extractor makes of batches. Dims after the first are flattened."""
        features = cls()
        with torch.no_grad():
            for batch in batches:
                features.update(extractor(batch))
        return features

    def update(self, features: Tensor) -> None:
        """Add rows of features, (rows, ...). The result does not depend on how rows are divided into batches."""
        rows = features.detach().flatten(1).double().cpu().numpy()
        if not len(rows):
            return
        total, mean = self.count + len(rows), rows.mean(0)
        away, shift = rows - mean, mean - self._mean
        self._scatter = self._scatter + away.T @ away + np.outer(shift, shift) * (self.count * len(rows) / total)
        self._mean = self._mean + shift * (len(rows) / total)
        self.count = total

    @property
    def mean(self) -> np.ndarray:
        """(features,) float64."""
        return np.asarray(self._mean)

    @property
    def covariance(self) -> np.ndarray:
        """(features, features) float64, divided by count - 1. Raises ValueError for fewer than two rows."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two rows of features, and there are {self.count}")
        return self._scatter / (self.count - 1)

    def distance(self, other: Features) -> float:
        """The Frechet distance to other features."""
        return frechet_distance(self.mean, self.covariance, other.mean, other.covariance)


def frechet_distance(mean_a: np.ndarray, covariance_a: np.ndarray, mean_b: np.ndarray,
                     covariance_b: np.ndarray) -> float:  # fmt: skip
    """The squared Frechet distance between two Gaussians (Dowson and Landau 1982):

        |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))

    Means: (n,). Covariances: (n, n), symmetric, positive semi-definite. Raises ValueError if shapes differ.
    """
    a, b = np.asarray(covariance_a, np.float64), np.asarray(covariance_b, np.float64)
    if a.shape != b.shape or np.shape(mean_a) != np.shape(mean_b):
        raise ValueError(f"the features have {len(a)} and {len(b)} dims: use one extractor for both")
    values, vectors = np.linalg.eigh(a)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    # The eigenvalues of C_a C_b are those of the symmetric root(C_a) C_b root(C_a).
    common = np.sqrt(np.linalg.eigvalsh(root @ b @ root).clip(min=0)).sum()
    apart = np.asarray(mean_a, np.float64) - np.asarray(mean_b, np.float64)
    return float(apart @ apart + np.trace(a) + np.trace(b) - 2 * common)
