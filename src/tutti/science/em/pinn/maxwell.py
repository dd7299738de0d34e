"""Maxwell's equations in the time domain around a point source, by a network: fields Ex, Ey, Hz of (x, y, t).

Lengths are in units of the square's edge and times of edge / c0; Hz is multiplied by the impedance of vacuum. In the
square |x|, |y| <= 1/2, open to all sides, from rest at t = 0,

    dEx/dt = dHz/dy,  dEy/dt = -dHz/dx,  dHz/dt = dEx/dy - dEy/dx - M,
    M = 30 p(t) exp(-r^2 / radius^2),  p(t) = -2 s exp(-s^2),  s = (t - delay) / width:

a magnetic current smoothed over a small disc, as in X. Huang et al. (arXiv 2111.01394), who also weight losses by
learned uncertainties (A. Kendall et al., CVPR 2018). Edges let waves out up to the second order in their angle
(B. Engquist and A. Majda, Math. Comput. 31, 629, 1977): for the normal n and the direction s along the edge,

    d(Hz - Ey nx + Ex ny)/dt = (dEx/ds nx^2 - dEy/ds ny^2) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from tutti.science.em.bounds import check_positive, check_whole
from tutti.science.em.descent import check_rate, descend
from tutti.science.em.fdtd import CPML, Current, Grid, Simulation, Snapshots
from tutti.science.em.fdtd.grid import C0, ETA0
from tutti.science.em.pinn.network import MultiScale, along

COMPONENTS = ("Ex", "Ey", "Hz")
AMPLITUDE = 30.0  # of M: fields are then about 1


class Fields(nn.Module):
    """(n, 3) of x, y, t -> (n, 3) of Ex, Ey, Hz, which are 0 at t = 0. logs: numbers w_i that weight the three losses,
    see `total`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.logs = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        t = x[:, 2:]
        return self.net(x) * t.square() / (t.square() + 0.01)

    def total(self, losses: Tensor) -> Tensor:
        """sum_i  exp(-w_i) L_i + w_i, with w_i in -4 .. 4; one past an end has no gradient and stays there."""
        w = self.logs.clamp(-4, 4)
        return (torch.exp(-w) * losses + w).sum()


@dataclass(frozen=True)
class PointSource:
    """The problem of this module. radius: radius of the source in edges. width, delay: width and delay of its pulse in
    edge / c0. duration: time from rest in which the equations are solved, in edge / c0."""

    radius: float = 0.06
    width: float = 0.12
    delay: float = 0.3
    duration: float = 1.0

    def __post_init__(self) -> None:
        check_positive("the source", radius=self.radius, width=self.width, delay=self.delay, duration=self.duration)

    def pulse(self, t: Tensor) -> Tensor:
        s = (t - self.delay) / self.width
        return -2 * s * torch.exp(-s.square())

    def current(self, x: Tensor) -> Tensor:
        return AMPLITUDE * self.pulse(x[:, 2]) * torch.exp(-x[:, :2].square().sum(1) / self.radius**2)

    def residuals(self, model: nn.Module, x: Tensor) -> Tensor:
        """The residuals of the three equations at points: (n, 3)."""
        (_, dx), (_, dy), (_, dt) = (along(model, x, axis) for axis in range(3))
        return torch.stack([dt[:, 0] - dy[:, 2], dt[:, 1] + dx[:, 2],
                            dt[:, 2] - dy[:, 0] + dx[:, 1] + self.current(x)], 1)  # fmt: skip

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        everywhere = self.residuals(model, batch["interior"]).square().sum(1).mean()
        near = self.residuals(model, batch["source"]).square().sum(1).mean()
        edge = self.outgoing(model, batch["edge"], batch["normal"]).square().mean()
        return model.total(torch.stack([everywhere, near, edge]))

    def outgoing(self, model: nn.Module, x: Tensor, normal: Tensor) -> Tensor:
        """Residuals of the condition on edges: (n,). normal: (n, 2)."""
        (nx, ny), along_edge = normal.T, torch.cat([normal.flip(1).abs(), torch.zeros_like(x[:, 2:])], 1)
        dt, ds = along(model, x, 2)[1], jvp(model, (x,), (along_edge,))[1]
        return dt[:, 2] - dt[:, 1] * nx + dt[:, 0] * ny - (ds[:, 0] * nx.abs() - ds[:, 1] * ny.abs()) / 2

    def batch(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """`count` points in space and time, half as many near the source while it is on, a quarter on edges."""
        uniform = torch.rand(count, 3, generator=generator) - torch.tensor([0.5, 0.5, 0.0])
        near = 1.2 * self.radius * torch.randn(count // 2, 2, generator=generator)
        when = self.delay + 2.5 * self.width * (2 * torch.rand(count // 2, 1, generator=generator) - 1)
        edge = torch.rand(count // 4, 3, generator=generator) - torch.tensor([0.5, 0.5, 0.0])
        side = torch.randint(4, (count // 4,), generator=generator)
        normal = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])[side]
        edge[:, :2] = torch.where(normal != 0, 0.5 * normal, edge[:, :2])
        scale = torch.tensor([1.0, 1.0, self.duration])
        return {"interior": uniform * scale, "edge": edge * scale, "normal": normal,
                "source": torch.cat([near.clamp(-0.5, 0.5), when.clamp(0, self.duration)], 1)}  # fmt: skip

    def fit(self, steps: int = 2000, count: int = 1024, rate: float = 3e-3, seed: int = 0,
            model: nn.Module | None = None, after: Callable[[int, float], None] | None = None) -> Fields:  # fmt: skip
        """Train a network, by default one of four scales with four layers of 64, by SOAP (N. Vyas et al., ICLR 2025),
        which the three losses, of different scales, call for: after as many steps Adam's errors are five times as
        large. after: called with each step and its loss every 100 steps. Raises ValueError if it diverges."""
        check_whole("the training", 2, steps=steps)
        check_whole("the training", 4, count=count)
        check_rate(rate)
        from pytorch_optimizer import SOAP  # takes seconds to import

        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            fields = Fields(model or MultiScale(3, 3, layers=4, omega=2.0))
        optimizer = SOAP(fields.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, precondition_frequency=10)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05,
                                                       cycle_momentum=False)  # fmt: skip
        descend(fields, optimizer, schedule, lambda: self.batch(count, generator), self.loss, steps, after,
                captured=False)  # fmt: skip
        return fields

    def reference(self, n: int = 100, times: int = 10) -> dict[str, tuple[Tensor, Tensor]]:
        """The fields by FDTD with n cells along an edge: component -> points (m, 3), values (m,), float64."""
        check_whole("the reference", n=n, times=times)
        h, layers = 1.0 / n, 12
        cells = n + 2 * layers
        grid = Grid((cells, cells), h, "TE")
        steps = math.ceil(self.duration / (0.9 * grid.courant_limit() * C0) / times) * times
        dt = self.duration / steps
        place = (torch.arange(n, dtype=torch.float64) + 0.5) * h - 0.5
        amount = AMPLITUDE * torch.exp(-(place[:, None].square() + place.square()) / self.radius**2)
        source = Current("Hz", (slice(layers, layers + n),) * 2, lambda t: self.pulse(t * C0), amount)
        every = steps // times
        inside = {"Ex": (n, n + 1), "Ey": (n + 1, n), "Hz": (n, n)}
        monitors = [Snapshots(name, name, tuple(slice(layers, layers + m) for m in shape), every)
                    for name, shape in inside.items()]  # fmt: skip
        result = Simulation(grid, CPML(layers, order=3), [source], monitors, dt=dt / C0,
                            dtype=torch.float64).run(1.0, steps)  # fmt: skip
        fields = {}
        for name, shape in inside.items():
            value = result[name] * (ETA0 if name == "Hz" else 1)
            t = (torch.arange(1, times + 1, dtype=torch.float64) * every - (0.5 if name == "Hz" else 0.0)) * dt
            axes = [(torch.arange(m, dtype=torch.float64) + (0.5 if m == n else 0.0)) * h - 0.5 for m in shape]
            points = torch.cartesian_prod(t, *axes)[:, [1, 2, 0]]
            fields[name] = points, value.flatten()
        return fields

    @torch.no_grad()
    def errors(self, model: nn.Module, reference: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """||found - reference|| / ||reference|| by component."""
        out = {}
        for i, name in enumerate(COMPONENTS):
            points, value = reference[name]
            predicted = torch.cat([model(x)[:, i] for x in points.float().split(4096)]).double()
            out[name] = float((predicted - value).norm() / value.norm())
        return out
