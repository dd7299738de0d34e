"""Fourier neural operators: maps between fields on regular grids (Z. Li et al., ICLR 2021, arXiv 2010.08895).

A layer is  x -> gelu(K x + W x): W acts on the channels of a point, and K is a convolution by the whole grid whose
Fourier coefficients are the parameters, for the lowest `modes` frequencies of each axis. So a trained operator takes
grids of any resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from tutti.science.em.bounds import check_whole
from tutti.science.em.shown import brief
from tutti.science.em.surrogate.geometry import relative_error


class Spectral(nn.Module):
    """A circular convolution with few Fourier coefficients over the last `len(modes)` axes, one or two.

    (batch, inputs, *grid) -> (batch, outputs, *grid). modes: frequencies of each axis below the highest, at most half
    the grid; of the first of two axes also the negative ones. weight: (corners, inputs, outputs, *modes, 2), its last
    axis real and imaginary parts.
    """

    def __init__(self, inputs: int, outputs: int, modes: Sequence[int]) -> None:
        super().__init__()
        check_whole("a spectral layer", inputs=inputs, outputs=outputs)
        if len(modes) not in (1, 2) or min(modes) < 1:
            raise ValueError(f"modes: one or two positive numbers, not {tuple(modes)}")
        self.modes = tuple(modes)
        self.outputs = outputs
        shape = (len(modes), inputs, outputs, *modes, 2)
        self.weight = nn.Parameter(torch.randn(shape) / sqrt(2 * inputs))

    def forward(self, x: Tensor) -> Tensor:
        grid = x.shape[2:]
        if len(grid) != len(self.modes):
            raise ValueError(f"a field of {len(grid)} axes, and {len(self.modes)} modes")
        if any(2 * m > n for m, n in zip(self.modes, grid, strict=True)):
            raise ValueError(f"{self.modes} modes need grids of twice as many points, not {tuple(grid)}")
        weight = torch.view_as_complex(self.weight)
        last, rest = self.modes[-1], grid[-1] // 2 + 1 - self.modes[-1]
        if len(grid) == 1:
            y = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :last], weight[0])
            return torch.fft.irfft(nn.functional.pad(y, (0, rest)), n=grid[-1])
        first = self.modes[0]
        modes = torch.fft.rfft2(x)
        low = torch.einsum("bimn,iomn->bomn", modes[..., :first, :last], weight[0])
        high = torch.einsum("bimn,iomn->bomn", modes[..., -first:, :last], weight[1])
        gap = low.new_zeros(*low.shape[:2], grid[0] - 2 * first, last)
        y = nn.functional.pad(torch.cat([low, gap, high], 2), (0, rest))
        return torch.fft.irfft2(y, s=(grid[0], grid[1]))


class FNO(nn.Module):
    """(batch, inputs, *grid) -> (batch, outputs, *grid). Grids have the period 1.

    `forward(fields, labels)` is the loss, the mean relative L2 error; `operate(fields)` the prediction. The places of
    points are further channels.
    """

    def __init__(self, inputs: int, outputs: int, modes: Sequence[int], width: int = 32, layers: int = 4) -> None:
        super().__init__()
        check_whole("the operator", inputs=inputs, outputs=outputs, width=width, layers=layers)
        if not isinstance(modes, tuple | list):
            raise ValueError(f"modes: one or two positive numbers, such as (8, 8), not {modes}")
        axes = len(modes)
        self.inputs, self.outputs, self.axes = inputs, outputs, axes
        point = nn.Conv1d if axes == 1 else nn.Conv2d
        self.lift = point(inputs + axes, width, 1)
        self.spectral = nn.ModuleList(Spectral(width, width, modes) for _ in range(layers))
        self.point = nn.ModuleList(point(width, width, 1) for _ in range(layers))
        self.project = nn.Sequential(point(width, 2 * width, 1), nn.GELU(), point(2 * width, outputs, 1))
        with torch.no_grad():
            for module in self.spectral:
                module.weight.mul_(1 / sqrt(width))  # pyright: ignore

    def check(self, fields: Tensor) -> None:
        """Raises ValueError for what `operate` does not take."""
        dtype = self.lift.weight.dtype
        if not isinstance(fields, Tensor) or fields.ndim != 2 + self.axes or fields.shape[1] != self.inputs:
            grid = ", ".join(("nx", "ny")[: self.axes])
            raise ValueError(f"fields: of shape (batch, {self.inputs}, {grid}), not {brief(fields)}")
        if fields.dtype != dtype and not torch.is_autocast_enabled(fields.device.type):
            raise ValueError(f"fields: {dtype} as the weights, not {fields.dtype}")

    def operate(self, fields: Tensor) -> Tensor:
        self.check(fields)
        grid = fields.shape[2:]
        lines = [torch.arange(n, dtype=fields.dtype, device=fields.device) / n for n in grid]
        places = torch.meshgrid(*lines, indexing="ij")
        x = self.lift(torch.cat([fields, torch.stack(places).expand(fields.shape[0], -1, *grid)], 1))
        for i, (spectral, point) in enumerate(zip(self.spectral, self.point, strict=True)):
            x = spectral(x) + point(x)
            x = nn.functional.gelu(x) if i < len(self.spectral) - 1 else x
        return self.project(x)

    def forward(self, fields: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.operate(fields)
        if labels.shape != predicted.shape:
            raise ValueError(f"labels: of shape {tuple(predicted.shape)}, not {tuple(labels.shape)}")
        return {"loss": relative_error(predicted, labels).mean()}
