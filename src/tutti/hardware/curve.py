"""Measured seconds with interpolation: over bytes (`Curve`) and over matrix shapes (`Grid`). Shares of a peak over
lengths (`Ramp`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import exp, log


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes: linear between points (bytes, seconds), with the last point's rate beyond it.

    Both coordinates rise. The first point is at 0 bytes: the latency.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        xs = [x for x, _ in self.points]
        if len(xs) < 2 or xs[0] != 0 or any(a >= b for a, b in pairwise(xs)):
            raise ValueError(f"a curve needs two or more points of rising bytes, the first at 0, not {xs}")
        if any(a[1] > b[1] for a, b in pairwise(self.points)):
            raise ValueError(f"a curve's seconds must not fall with bytes: {self.points}")

    @staticmethod
    def through(points: Iterable[tuple[float, float]], start: float | None = None) -> Curve:
        """The curve through measurements, made monotonic. start: seconds at 0 bytes, by default the minimum."""
        xs, ys = zip(*sorted(points), strict=True)
        first: float = ys[0] if start is None else start
        return Curve(((0.0, first), *zip(xs, accumulate((max(y, first) for y in ys), max), strict=True)))

    @cached_property
    def _bytes(self) -> list[float]:
        return [x for x, _ in self.points]

    @property
    def start(self) -> float:
        return self.points[0][1]

    def seconds(self, count: float) -> float:
        last = self.points[-1]
        if count >= last[0]:
            return last[1] * count / last[0]
        i = bisect_right(self._bytes, count)
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return y0 + (y1 - y0) * (count - x0) / (x1 - x0)


@dataclass(frozen=True)
class Ramp:
    """The share of a peak that work of some length reaches: `most` of infinite length, half of it at `half`."""

    most: float
    half: float

    def at(self, length: float) -> float:
        return self.most * length / (length + self.half)


@dataclass(frozen=True)
class Grid:
    """Seconds of a matrix product (m x k) @ (k x n): power laws between measured sizes.

    sizes: sizes of each of m, k and n, rising. seconds: seconds of each (m, k, n), n the fastest. Beyond the largest
    size the time grows linearly with the size; below the smallest it is constant. call: the part of the seconds that a
    batch of products in one operator takes once.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    call: float = 0.0

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.sizes) ** 3 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                f"a grid over {len(self.sizes)} sizes needs {len(self.sizes)}^3 seconds, not {len(self.seconds)}"
            )

    @staticmethod
    def of(sizes: Sequence[int], measured: Mapping[tuple[int, int, int], float], call: float = 0.0) -> Grid:
        """Unmeasured shapes run at the rate of the nearest measured one, but never slower than a larger shape."""
        above = dict(pairwise((*sizes, 0)))
        table: dict[tuple[int, int, int], float] = {}
        for m, k, n in product(reversed(sizes), repeat=3):
            near = min(measured, key=lambda s: sum(abs(log(a / b)) for a, b in zip(s, (m, k, n), strict=True)))
            time = measured[near] * (m * k * n) / (near[0] * near[1] * near[2])
            larger = [(above[m], k, n), (m, above[k], n), (m, k, above[n])]
            table[m, k, n] = min(time, *(table.get(s, time) for s in larger))
        return Grid(tuple(sizes), tuple(reversed(table.values())), call)

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return [log(s) for s in self.sizes], [log(s) for s in self.seconds]

    def at(self, m: float, k: float, n: float) -> float:
        """Seconds of one product."""
        xs, ys = self._logs
        count = len(xs)
        beyond, corners = 0.0, [(0, 1.0)]
        for size in (m, k, n):
            x = log(max(size, self.sizes[0]))
            if x > xs[-1]:
                beyond, x = beyond + x - xs[-1], xs[-1]
            i = min(bisect_right(xs, x), count - 1) - 1
            share = (x - xs[i]) / (xs[i + 1] - xs[i])
            corners = [(at * count + i + up, w * s) for at, w in corners for up, s in ((0, 1 - share), (1, share)) if s]
        return exp(beyond + sum(ys[at] * w for at, w in corners))
