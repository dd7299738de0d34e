"""How near a model is to the truth."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms(model: Tensor, truth: Tensor, weight: Tensor | None = None) -> float:
    """Root mean square difference, decades. weight: weights of cells, for instance their areas."""
    square = (model - truth).square()
    return (square.mean() if weight is None else (square * weight).sum() / weight.sum()).sqrt().item()


def ssim(model: Tensor, truth: Tensor, window: int = 7) -> float:
    """Structural similarity of two sections (nz, nx), with a uniform window and the range of the truth: Wang et al.,
    IEEE Trans. Image Processing 13(4), 2004."""
    if min(truth.shape) < window:
        raise ValueError(f"a window of {window} cells does not fit in a section of {tuple(truth.shape)}")
    span = (truth.max() - truth.min()).item()
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    n = window**2

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x.double()[None, None], window, 1)[0, 0]

    a, b = mean(model), mean(truth)
    scale = n / (n - 1)
    va, vb = ((mean(x * x) - m * m) * scale for x, m in ((model, a), (truth, b)))
    cov = (mean(model * truth) - a * b) * scale
    return (((2 * a * b + c1) * (2 * cov + c2)) / ((a * a + b * b + c1) * (va + vb + c2))).mean().item()


def sharpness(model: Tensor, truth: Tensor, z: Tensor, rows: int = 4) -> float:
    """How sharp the lower boundary of the conductor is: the steepest rise of a column over `rows` rows near that of the
    truth, over the truth's, averaged over columns whose truth rises by half a decade or more. 1 is as sharp."""
    rise, steep = (x[rows:] - x[:-rows] for x in (model, truth))
    height, at = steep.max(0)
    near = torch.arange(len(rise))[:, None]
    ours = rise.where((near - at).abs() <= rows, torch.tensor(-torch.inf, dtype=rise.dtype)).amax(0)
    counted = height >= 0.5
    if not counted.any():
        raise ValueError("no column of the truth rises by half a decade")
    return (ours[counted] / height[counted]).mean().item()
