"""A geometry: parameters, frequencies, and a solver that gives S-parameters of a point.

stub = Geometry("stub", Space((Parameter("length", 5e-3, 2e-2, "m"),)), frequencies, ("S11", "S21"), solve)
s = stub(torch.tensor([[1e-2]]))        # complex (1, traces, frequencies)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.science.em.shown import Brief
from tutti.science.em.surrogate.curves import REPRESENTATIONS
from tutti.science.em.surrogate.parameters import Space


@dataclass(frozen=True, repr=False)
class Geometry(Brief):
    """name: stands for `solve` in files of samples and surrogates; give a solver that changes another one.

    frequencies: in Hz, increasing. traces: what `solve` returns the rows of, such as S11 and S21.

    solve: from a value of each parameter to complex S-parameters (traces, frequencies) of a passive device that is
    driven at one port. It runs in other processes too, if it is a function of a module.
    representation: how networks see curves, see `curves`.
    """

    name: str
    space: Space
    frequencies: Tensor
    traces: tuple[str, ...]
    solve: Callable[[Mapping[str, float]], Tensor] = field(repr=False)
    representation: str = "complex"

    def __post_init__(self) -> None:
        f = self.frequencies
        if not callable(self.solve):
            raise ValueError(f"solve of {self.name}: from values of parameters to a tensor of S, not {self.solve!r}")
        if not isinstance(f, Tensor) or f.ndim != 1 or len(f) < 2 or not bool((f.diff() > 0).all()):
            raise ValueError(f"frequencies of {self.name}: at least two, increasing, in Hz")
        if self.representation not in REPRESENTATIONS:
            raise ValueError(f"representation: {' or '.join(REPRESENTATIONS)}, not {self.representation!r}")

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of S: (traces, frequencies)."""
        return len(self.traces), len(self.frequencies)

    def __call__(self, points: Tensor | Mapping[str, float] | Sequence[float]) -> Tensor:
        """Solve points in the ranges: complex128 (n, traces, frequencies).

        Raises ValueError for points out of range, and for what `solve` returns if it is no passive response.
        """
        x = self.space.points(points)
        self.space.check(x)
        return torch.stack([self.solved(row) for row in x])

    def solved(self, point: Tensor) -> Tensor:
        """S of one point (parameters,), wherever it lies: complex128 (traces, frequencies)."""
        s = self.solve(dict(zip(self.space.names, point.tolist(), strict=True)))
        return check_s(s, self.shape, f"{self.name} at {self.space.describe(point)}")


def check_s(s: Tensor, shape: tuple[int, ...], what: str, gain: float = 1.05) -> Tensor:
    """S-parameters as complex128. Raises ValueError for another shape, NaN, and a column of S, which is all traces at a
    frequency, whose norm is above `gain`."""
    if not isinstance(s, Tensor) or tuple(s.shape) != tuple(shape):
        shown_shape = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
        raise ValueError(f"S of {what}: shape (..., traces, frequencies) = {tuple(shape)}, not {shown_shape}")
    s = s.detach().to(torch.complex128)
    if not bool(torch.isfinite(torch.view_as_real(s)).all()):
        raise ValueError(f"S of {what} is not finite at {(~torch.isfinite(s.abs())).nonzero()[0].tolist()}")
    most = float(s.abs().square().sum(-2).sqrt().max()) if s.numel() else 0.0
    if most > gain:
        raise ValueError(f"S of {what}: a column has the norm {most:.3f}, of a passive device at most 1; the "
                         "solver ran too few steps, or its ports are wrong")  # fmt: skip
    return s


def relative_error(s: Tensor, truth: Tensor) -> Tensor:
    """||s - truth|| / ||truth|| with norms over all dims but the first, traces and frequencies for curves: (n,).

    Raises ValueError for a truth of zeros, except while it is traced.
    """
    norm = truth.flatten(1).norm(dim=1)
    if type(truth) is Tensor and not torch.compiler.is_compiling() and bool((norm == 0).any()):
        raise ValueError(f"sample {int((norm == 0).nonzero()[0])} is 0 everywhere: it has no relative error")
    return (s - truth).flatten(1).norm(dim=1) / norm
