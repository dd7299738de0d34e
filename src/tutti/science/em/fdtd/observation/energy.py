"""The energy of the discrete equations over time.

With E at n dt, and H and J of poles half a step before (-) and after (+) it, a step changes

    W(n) = V / 2 sum (eps E^2 + mu H- H+)  +  V / 2 sum (J- J+ - g / 2 (J+^2 - J-^2) + w0^2 P^2) / (eps0 s),

V the volume of a cell (its area in two dimensions), w0 the resonance and s the strength of a pole, g = damping dt, by

    - V dt / 4 sum sigma (E + E')^2  -  V g sum (M^2 + M'^2) / (eps0 s),  M = (J- + J+) / 2,

primes for the next step: curls of E and H are each other's transpose. Without loss W is constant, with loss it
decreases, and up to the Courant limit it is positive; all this follows from the updates, those of poles in
`dispersion`. In absorbing layers it counts E and H alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tutti.science.em.fdtd.problem import Problem, within


class Watch:
    """Samples of W in a run. every: steps between samples, by monitor. planes: planes of axis 0 that count; all by
    default.

    values: energies before steps 0, every, 2 every, ..., by monitor (samples, shots).
    """

    def __init__(self, problem: Problem, volume: float, every: Sequence[int], steps: int, dt: float,
                 planes: slice = slice(None)):  # fmt: skip
        self.problem, self.volume, self.every, self.dt, self.planes = problem, volume, every, dt, planes
        self.values = [torch.zeros(-(-steps // n), problem.shots, dtype=torch.float64) for n in every]

    def advance(self, loop: Callable[..., None], state: Sequence[Tensor], waves: Tensor, results: Sequence[Tensor],
                start: int, steps: int, history: Sequence[Tensor]) -> None:  # fmt: skip
        """`loop(state, waves, results, start, steps, history)` in pieces, with samples between them."""
        stop = start + steps
        marks = sorted({n for x in self.every for n in range(-(-start // x) * x, stop, x)})
        edges = sorted({start, stop, *marks, *(n + 1 for n in marks)})
        for a, b in pairwise(edges):
            before = self.before(state) if a in marks else None
            part = within(self.problem, results, start, a - start, b - a)
            loop(state, waves, part, a, b - a, [x[a - start : b - start] for x in history])
            if before is None:
                continue
            value = self.after(state, *before)
            for x, out in zip(self.every, self.values, strict=True):
                if a % x == 0:
                    out[a // x] = value

    def total(self, x: Tensor) -> Tensor:
        """Sum over own places, by shot."""
        return x[:, self.planes].double().sum((1, 2, 3))

    def before(self, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The energy of E and P before a step, and copies of H and J."""
        x, out = self.problem, torch.zeros(self.problem.shots, dtype=torch.float64)
        for i in range(3):
            if x.present[i]:
                a, b = x.a[i].double() if x.a[i].numel() else 1.0, x.b[i].double()
                eps = torch.where(b > 0, self.dt * (1 + a) / 2 / b.clamp(min=1e-300), 0.0)
                out += self.total(eps * state[i].double().square())
        for number, pole in enumerate(x.poles):
            for i in range(3):
                if pole.gain[i].numel():
                    p = state[18 + 6 * number + 3 + i].double()
                    out += self.of_pole(number, i, pole.spring / self.dt * p.square())
        fields = [state[i].clone() for i in range(3, 6)]
        return out, fields + [state[18 + 6 * n + i].clone() for n in range(len(x.poles)) for i in range(3)]

    def after(self, state: Sequence[Tensor], out: Tensor, fields: Sequence[Tensor]) -> Tensor:
        """W in joules, with H and J of both sides."""
        x = self.problem
        for i in range(3):
            if x.present[3 + i]:
                mu = self.dt / x.b[3 + i].double()
                out = out + self.total(mu * fields[i].double() * state[3 + i].double())
        for number, pole in enumerate(x.poles):
            g = (1 - pole.keep) / (1 + pole.keep)
            for i in range(3):
                if pole.gain[i].numel():
                    first, last = fields[3 + 3 * number + i].double(), state[18 + 6 * number + i].double()
                    kinetic = first * last - g / 2 * (last.square() - first.square())
                    out = out + self.of_pole(number, i, kinetic / (1 + g))
        return out * self.volume / 2

    def of_pole(self, number: int, i: int, x: Tensor) -> Tensor:
        """Sum of x (1 + g) / (eps0 s) over own places of a pole, by shot; eps0 s = gain (1 + g) / dt."""
        pole = self.problem.poles[number]
        gain = pole.gain[i].double()
        x = torch.where(gain > 0, x * self.dt / gain.clamp(min=1e-300), 0.0)
        begin, end, _ = self.planes.indices(self.problem.array[0])
        first, last = (min(max(n, pole.start[0]), pole.stop[0]) - pole.start[0] for n in (begin, end))
        return x[:, first:last].sum((1, 2, 3))
