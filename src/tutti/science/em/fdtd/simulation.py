"""A simulation: a grid with absorbing layers, sources and monitors, which runs over given materials.

grid = Grid((100, 100), 0.01)
sim = Simulation(grid, cpml=CPML(10), sources=[Current("Ez", (20, 50), gaussian_up_to(1.4e9))],
                 monitors=[Probe("seen", "Ez", [(75, 50)])])
eps_r = torch.ones(grid.shape, requires_grad=True)
sim.run(eps_r, steps=350)["seen"].square().sum().backward()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.hardware.threads import threads
from tutti.keywords import names_nearest
from tutti.science.em.fdtd import placed, resolution
from tutti.science.em.fdtd.excitation import sources
from tutti.science.em.fdtd.grid import EPS0, Grid
from tutti.science.em.fdtd.media import materials
from tutti.science.em.fdtd.media.cpml import CPML, Lines, lines
from tutti.science.em.fdtd.media.dispersion import Pole
from tutti.science.em.fdtd.media.materials import Material
from tutti.science.em.fdtd.observation import arrival, monitors
from tutti.science.em.fdtd.observation.energy import Watch
from tutti.science.em.fdtd.observation.monitors import Energy, Monitor
from tutti.science.em.fdtd.problem import PoleArrays, Problem, Reading, Setting, reading, table
from tutti.science.em.fdtd.stepping import elsewhere, march
from tutti.science.em.fdtd.stepping.slabs import Slab
from tutti.science.em.shown import Brief, brief


@dataclass(frozen=True, repr=False)
class Result(Brief):
    """`result[name]`: what a monitor saw. `state`: state of the fields at the end, from which another run can go on.

    Of several processes that share a simulation, each has the `state` of its planes. steps: number of steps since rest,
    of `dt` seconds each. sent: numbers of messages to the neighbours and of their bytes.
    """

    values: Mapping[str, Tensor]
    state: list[Tensor] = field(repr=False)
    grid: Grid
    dt: float
    steps: int = 0
    sent: tuple[int, int] = (0, 0)
    monitors: tuple[Monitor, ...] = field(default=(), repr=False)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.values:
            raise KeyError(f"no monitor {name!r}; there are {', '.join(self.values) or 'none'}")
        return self.values[name]


@dataclass(frozen=True)
class Simulation:
    """monitors: monitors with different names; a `LinePlane` stands for its parts.

    dt: time step in seconds; by default `courant` of the limit in vacuum.

    design: slices of cells outside of which gradients of materials are zero; on CPUs gradients cost memory and time
    only inside.
    dtype: float32 or float64.
    group: processes that share the grid as slabs along x. All call `run` with the same arguments, take gradients of the
    same loss, and get the same results. halo: planes that two neighbours compute both, which is also how many steps
    pass between their messages. slabs: planes of each process; by default so that all compute equally many.
    """

    grid: Grid
    cpml: CPML | None = None
    sources: Sequence[Any] = ()
    monitors: Sequence[Any] = ()
    dt: float = 0.0
    courant: float = 0.9
    design: Sequence[slice] | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    group: dist.ProcessGroup | None = None
    halo: int = 4
    slabs: Sequence[int] = ()
    warned: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Grid):
            raise ValueError(f"grid: a Grid, such as Grid((60, 60), 0.01), not {self.grid!r}")
        if self.cpml is not None and not isinstance(self.cpml, CPML):
            raise ValueError(f"cpml: a CPML, such as CPML(10), or None, not {self.cpml!r}")
        sources.check_sources(self.sources)
        object.__setattr__(self, "monitors", monitors.expanded(self.monitors))
        names = [x.name for x in self.monitors]
        if len(set(names)) < len(names):
            raise ValueError(f"monitors need different names: {names}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype: float32 or float64, not {self.dtype}")
        if torch.device(self.device).type != "cpu" and any(isinstance(x, Energy) for x in self.monitors):
            raise ValueError(f"monitors of energy run on CPUs only, not on {self.device}")
        if self.group is not None and torch.device(self.device).type != "cpu":
            raise ValueError(f"processes share a simulation on CPUs only, not on {self.device}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"no CUDA device: PyTorch finds none for device={str(self.device)!r}")
        if self.group is None and (self.slabs or self.halo != type(self).halo):
            raise ValueError(f"halo = {self.halo} and slabs = {self.slabs}: options of a group, which is missing")
        axes = len(self.grid.shape)
        if self.cpml and isinstance(self.cpml.cells, tuple) and len(self.cpml.cells) != axes:
            raise ValueError(f"absorbing layers of {len(self.cpml.cells)} axes, {self.cpml.cells}, in a grid of {axes}")
        placed.check_surfaces(self.grid, self.cpml, self.monitors, self.sources)
        object.__setattr__(self, "warned", self.group is not None and dist.get_rank(self.group) > 0)
        object.__setattr__(self, "dt", self.dt or self.courant * self.grid.courant_limit())
        if not 0 < self.dt < float("inf"):
            raise ValueError(f"dt: a positive number of seconds, not {self.dt}; courant is {self.courant}")

    def warn(self, *warnings: str, level: int = 5) -> None:
        """Warn of what is found in a run from rest: once, and on the first process of a group. level: stack level of
        the caller, as `warnings.warn` counts it."""
        object.__setattr__(self, "warned", bool(warnings))
        for text in warnings:
            warn(text, stacklevel=level)

    @property
    def lines(self) -> list[list[Lines]]:
        """Coefficients of differences: those of E and of H, each by axis of the kernels."""
        out: list[list[Lines]] = []
        for electric in (True, False):
            by_axis: dict[int, Lines] = {}
            for axis in range(len(self.grid.shape)):
                by_axis[self.grid.axes[axis]] = lines(self.grid, self.cpml, axis, self.dt, electric)
            nothing = torch.zeros(0, dtype=torch.float64)
            flat = Lines(torch.zeros(1).double(), nothing, nothing, torch.tensor([-1]), (0, 0, 0, 0))
            out.append([by_axis.get(d, flat) for d in range(3)])
        return out

    def run(self, eps_r: Material = 1.0, steps: int = 0, *, sigma: Material | None = None, mu_r: Material = 1.0,
            pec: Tensor | Mapping[str, Tensor] | None = None, poles: Sequence[Pole] = (), after: Result | None = None,
            checkpoints: int | None = None, memory: float | None = None) -> Result:  # fmt: skip
        """Run `steps` steps from rest, or from the end of the run `after`.

        eps_r, mu_r, sigma (S/m): a number, a tensor over cells, or tensors over nodes by component. pec: cells, or
        nodes by component, that conduct perfectly. poles: poles of dispersive media. Gradients reach eps_r, sigma, the
        strengths of poles and the waveforms of these steps, and not through the state of the run `after`.
        checkpoints, memory: how gradients are taken; see `march.schedule`.
        Raises ValueError for a time step that is not stable, for materials that are not numbers, for a mu_r that
        requires gradients, and for a run `after` whose time step, grid, layers, shots, poles or dtype differ.
        """
        problem, waves, parameters, orders = self.prepare(eps_r, steps, sigma, mu_r, pec, poles, after)
        needs = self.needs(waves, parameters)
        if needs.gains:
            self.check_design(problem)
        slab = Slab(problem, self.group, self.halo, self.slabs) if self.group is not None else None
        own = slab.problem if slab else problem
        plan = march.Schedule(steps, steps, 0)
        if any(vars(needs).values()):
            plan = (march.agreed(slab, needs, steps, checkpoints, memory) if slab else
                    march.schedule(problem, needs, steps, checkpoints, memory))  # fmt: skip
        state = own.state()
        if after:
            self.check_after(after, state)
            for x, y in zip(state, after.state, strict=True):
                x.copy_(y)
        watch = None
        if torch.device(self.device).type == "cpu":
            watch = self.watch(own, slab, steps)
            results = march.March.apply(slab or problem, watch, needs, plan, state, waves, *parameters)
        elif any(vars(needs).values()) or not elsewhere.triton_kernels():
            results, state = elsewhere.differentiable(problem, parameters, waves, state, plan.length)
            state = [x.detach() for x in state]
        else:
            results = elsewhere.forward(problem, state, waves)
        values = self.named(results, orders, problem)
        if watch:
            energies = slab.summed(watch.values) if slab else watch.values
            for name, x in zip((x.name for x in self.monitors if isinstance(x, Energy)), energies, strict=True):
                values[name] = x.T if problem.shots > 1 else x[:, 0]
        if not self.warned and slab is None and after is None:
            fields = [x.reshape(problem.shots, *problem.array) if x.numel() else x for x in state[:6]]
            self.warn(*arrival.not_decayed(self.grid, self.monitors, values, fields, steps, self.dt), level=3)
        sent = (slab.sent[0], slab.sent[1]) if slab else (0, 0)
        return Result(
            values, state, self.grid, self.dt, (after.steps if after else 0) + steps, sent, tuple(self.monitors)
        )

    def watch(self, problem: Problem, slab: Slab | None, steps: int) -> Watch | None:
        every = [x.every for x in self.monitors if isinstance(x, Energy)]
        planes = slice(slab.low - slab.first, slab.high - slab.first) if slab else slice(None)
        return Watch(problem, prod(self.grid.lengths), every, steps, self.dt, planes) if every else None

    def needs(self, waves: Tensor, parameters: Sequence[Tensor]) -> march.Needs:
        wanted = [x.requires_grad and torch.is_grad_enabled() for x in parameters]
        a, gains = any(wanted[3:6]), any(wanted[6:])
        return march.Needs(any(wanted[:3]) or a or gains, a, gains, waves.requires_grad and torch.is_grad_enabled())

    def adjoint_memory(self, eps_r: Material = 1.0, steps: int = 0, *, sigma: Material | None = None,
                       mu_r: Material = 1.0, pec: Tensor | Mapping[str, Tensor] | None = None,
                       poles: Sequence[Pole] = (), checkpoints: int | None = None,
                       memory: float | None = None) -> int:  # fmt: skip
        """Bytes that a run and its gradient take beside materials and results. Arguments as in `run`."""
        problem, waves, parameters, _ = self.prepare(eps_r, steps, sigma, mu_r, pec, poles, None)
        return march.schedule(problem, self.needs(waves, parameters), steps, checkpoints, memory).bytes

    @threads(1)  # as in `march`
    def prepare(self, eps_r: Material, steps: int, sigma: Material | None, mu_r: Material, pec: Any,
                poles: Sequence[Pole],
                after: Result | None) -> tuple[Problem, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
        """The arrays of the kernels, the waves, what gradients are taken of, and the order of what is read."""
        if not hasattr(steps, "__index__") or steps < 1:
            raise ValueError(f"steps: at least 1, not {steps}")
        if isinstance(poles, Pole) or not all(isinstance(x, Pole) for x in poles):
            raise ValueError(f"poles: a list of them, as of `drude` and `lorentz`, not {brief(poles)}")
        if after is not None and not isinstance(after, Result):
            raise ValueError(f"after: the result of a run, not {brief(after)}")
        grid, dtype, device = self.grid, self.dtype, torch.device(self.device)
        none = torch.empty(0, dtype=dtype, device=device)
        a, b, present = [none] * 6, [none] * 6, [False] * 6
        least_eps = least_mu = float("inf")
        most_eps = most_mu = 1.0
        design = self.region
        added = self.conductivity()
        for name in grid.components:
            i = grid.component(name)
            present[i] = True
            what = eps_r if i < 3 else mu_r
            value = materials.at_component(grid, what, name, "eps_r" if i < 3 else "mu_r", torch.float64, device,
                                           design)  # fmt: skip
            check(value, name, "eps_r" if i < 3 else "mu_r", 0.0)
            if i >= 3 and value.requires_grad and torch.is_grad_enabled():
                raise ValueError("mu_r requires gradients, which runs do not have: detach it")
            if i >= 3:
                b[i] = materials.magnetic(value, self.dt).to(dtype).contiguous()
                least_mu = min(least_mu, float(value.detach().min()))
                most_mu = max(most_mu, float(value.detach().max()))
                continue
            least_eps = min(least_eps, float(value.detach().min()))
            most_eps = max(most_eps, float(value.detach().max()))
            loss = (None if sigma is None else
                    materials.at_component(grid, sigma, name, "sigma", torch.float64, device, design))  # fmt: skip
            if loss is not None:
                check(loss, name, "sigma", -1e-300)
            if name in added:
                loss = added[name].reshape(grid.array).to(device) + (0 if loss is None else loss)
            wall = None if pec is None else materials.conductor(grid, pec, name, device)
            a_e, b_e = materials.electric(value, loss, wall, self.dt)
            needed = b_e.ndim > 0 or b_e.requires_grad or (a_e is not None and a_e.ndim > 0)
            b[i] = (b_e.expand(grid.array) if needed else b_e).to(dtype).contiguous()
            a[i] = none if a_e is None else a_e.expand(grid.array).to(dtype).contiguous()
        self.check_dt(least_eps, least_mu, poles)
        lines_of = self.lines
        arrays, gains = self.pole_arrays(poles)

        def gain(component: int, place: Tensor) -> Tensor:
            x = b[component].detach()
            return (x.flatten()[place.to(device)] if x.numel() > 1 else x.expand(place.shape)).double().cpu()

        start = after.steps if after else 0
        setting = Setting(grid, self.dt, steps, lines_of, gain, start)
        shots = sources.shots(self.sources)
        of_sources = [(s, s.entries(setting)) for s in self.sources]
        entries = [x for _, of in of_sources for x in of]
        placed.check_waves(setting, of_sources, arrays)
        if not after and not self.warned:
            if isinstance(eps_r, Mapping) and isinstance(mu_r, Mapping):  # lengths and areas of cut cells
                most_eps = most_mu = 1.0
            driven = [(getattr(s, "waveform", None), x.waves[:, 0]) for s, of in of_sources for x in of[:1]]
            self.warn(*placed.absorbed(setting, entries), *placed.conducting(setting, entries),
                      *placed.hidden(setting, self.monitors), *monitors.empty(self.monitors, steps),
                      *resolution.coarse(grid, driven, self.dt, most_eps, most_mu),
                      *arrival.too_slow(self.monitors, steps * self.dt),
                      *arrival.too_early(setting, of_sources, self.monitors, least_eps, least_mu))  # fmt: skip
        waves = torch.cat([x.waves for x in entries], 1) if entries else torch.zeros(steps, 1, dtype=torch.float64)
        columns, count = [], 0
        for x in entries:
            columns.append(count)
            count += x.waves.shape[1]
        tables = [y for kind in range(3) for y in table(entries, kind, shots, grid.array, columns, dtype, device)]
        readings, orders = self.readings(setting)
        problem = Problem(grid.array, grid.flat, tuple(present), shots, dtype, device, lines_of,
                          [x.detach() for x in a], [x.detach() for x in b], arrays, tables, readings,
                          (0, grid.array[0] - 1), self.box())  # fmt: skip
        return problem, waves.to(device, dtype), [*b[:3], *a[:3], *gains], orders

    def conductivity(self) -> dict[str, Tensor]:
        """What sources add, by component: flat over nodes."""
        out: dict[str, Tensor] = {}
        for x in self.sources:
            for name, place, value in x.conductivity(self.grid) if hasattr(x, "conductivity") else ():
                out.setdefault(name, torch.zeros(self.grid.nodes, dtype=torch.float64).flatten())[place] += value
        return out

    def check_dt(self, eps_r: float, mu_r: float, poles: Sequence[Pole]) -> None:
        limit = self.grid.courant_limit(eps_r, mu_r)
        own = sum(float(torch.as_tensor(x.strength).detach().max()) / eps_r + x.resonance**2 for x in poles)
        if own:
            limit = 2 / sqrt((2 / limit) ** 2 + own)
        if not self.dt <= limit * (1 + 1e-9):
            raise ValueError(f"dt = {self.dt:.6g} s is not stable: the Courant limit is {limit:.6g} s for cells of "
                             f"{' x '.join(f'{x:g}' for x in self.grid.lengths)} m, eps_r >= {eps_r:g}"
                             + (f" and {len(poles)} poles" if own else ""))  # fmt: skip

    def check_after(self, after: Result, state: Sequence[Tensor]) -> None:
        """Raises ValueError unless the end of a run can take the place of `state`."""
        if after.dt != self.dt:
            raise ValueError(f"after: a run with dt = {after.dt:.9g} s; this one has {self.dt:.9g} s")
        ours, theirs = ((len(x) - 18) // 6 for x in (state, after.state))
        if ours != theirs:
            raise ValueError(f"after: a run with {theirs} poles; this one has {ours}")
        for i, (x, y) in enumerate(zip(state, after.state, strict=True)):
            if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
                what = "fields" if i < 6 else "absorbing layers" if i < 18 else "poles"
                raise ValueError(f"after: a run with {what} of shape {tuple(y.shape)}, {y.dtype} on {y.device}; this "
                                 f"one has {tuple(x.shape)}, {x.dtype} on {x.device}")  # fmt: skip

    @property
    def region(self) -> list[slice]:
        """The design region in cells."""
        return [slice(*x.indices(n)[:2]) for x, n in zip(self.design or (), self.grid.shape, strict=False)]

    def box(self) -> tuple[int, ...]:
        """The design region in nodes: from, then to, by axis of the kernels."""
        begin, end = [0, 0, 0], list(self.grid.array)
        for axis, part in zip(self.grid.axes, self.region, strict=False):
            begin[axis], end[axis] = part.start, part.stop + 1
        return (*begin, *end)

    def check_design(self, problem: Problem) -> None:
        for pole in problem.poles:
            if any(x < y for x, y in zip(pole.start, problem.box[:3], strict=True)) or any(
                x > y for x, y in zip(pole.stop, problem.box[3:], strict=True)
            ):
                raise ValueError(f"gradients of a pole at nodes {pole.start} to {pole.stop} need a design region that "
                                 f"contains it, not nodes {problem.box[:3]} to {problem.box[3:]}")  # fmt: skip

    def pole_arrays(self, poles: Sequence[Pole]) -> tuple[list[PoleArrays], list[Tensor]]:
        grid, device = self.grid, torch.device(self.device)
        arrays, gains, none = [], [], torch.empty(0, dtype=self.dtype, device=device)
        for pole in poles:
            strength = torch.as_tensor(pole.strength, dtype=torch.float64, device=device)
            counts = torch.ones_like(strength) if strength.requires_grad else strength.detach()
            if pole.where is not None:
                if tuple(pole.where.shape) != grid.shape:
                    raise ValueError(f"where of a pole has shape {tuple(pole.where.shape)}; cells have {grid.shape}")
                strength, counts = (torch.where(pole.where.to(device), x, 0.0) for x in (strength, counts))
            loss = 1 + pole.damping * self.dt
            whole, used = [none] * 3, torch.zeros(grid.array, dtype=torch.bool, device=device)
            for name in grid.components:
                if name[0] == "E":
                    x, n = (materials.at_component(grid, y, name, "strength of a pole", torch.float64, device)
                            for y in (strength, counts))  # fmt: skip
                    whole[grid.component(name)] = (EPS0 * self.dt / loss * x).expand(grid.array)
                    used = used | (n != 0)
            where = used.nonzero()
            if not len(where):
                continue
            begin = tuple(int(x) for x in where.min(0).values)
            end = tuple(int(x) + 1 for x in where.max(0).values)
            box = tuple(slice(x, y) for x, y in zip(begin, end, strict=True))
            of_pole = [x[box].to(self.dtype).contiguous() if x.numel() else none for x in whole]
            keep, spring = (1 - pole.damping * self.dt) / loss, pole.resonance**2 * self.dt / loss
            arrays.append(PoleArrays(begin, end, keep, spring, self.dt, [x.detach() for x in of_pole]))  # pyright: ignore
            gains += of_pole
        return arrays, gains

    def readings(self, setting: Setting) -> tuple[list[Reading], list[Tensor]]:
        out, orders = [], []
        device = torch.device(self.device)
        for x in self.monitors:
            if isinstance(x, Energy):
                continue
            number = self.grid.component(x.component)
            phase, every = torch.zeros(0, dtype=self.dtype, device=device), 1
            if isinstance(x, monitors.Probe):
                place = torch.cat([sources.places(self.grid, p, f"monitor {x.name}")[0] for p in x.points])
            else:
                place, _ = sources.places(self.grid, x.where, f"monitor {x.name}")
                every = x.every
            if isinstance(x, monitors.Spectrum):
                times = setting.times(1.0 if number < 3 else 0.5)
                phase = monitors.phases(x, times, self.dt).to(device, self.dtype)
            r, order = reading(number, place, self.grid.array, every, phase)
            out.append(r)
            orders.append(order)
        return out, orders

    def named(self, results: Sequence[Tensor], orders: Sequence[Tensor], problem: Problem) -> dict[str, Tensor]:
        out = {}
        ordered = iter(zip(results, orders, strict=True))
        for x in self.monitors:
            if isinstance(x, Energy):
                continue
            value, order = next(ordered)
            sign = self.grid.h_sign if x.component[0] == "H" else 1
            if isinstance(x, monitors.Spectrum):
                y = torch.view_as_complex(value.index_select(2, order))
            else:
                y = value.index_select(2, order).transpose(0, 1)
            y = -y if sign < 0 else y
            if not isinstance(x, monitors.Probe):
                region = sources.places(self.grid, x.where, x.name)[1]
                y = y.unflatten(2, region) if region else y.squeeze(2)
            out[x.name] = y if problem.shots > 1 else y.squeeze(0)
        return out


def check(x: Tensor, name: str, what: str, above: float) -> None:
    """Raises ValueError unless all are finite and above a bound."""
    x = x.detach()
    if not bool(torch.isfinite(x).all()):
        at = (~torch.isfinite(x)).nonzero()[0].tolist()
        raise ValueError(f"{what} of {name} is {float(x[tuple(at)])}" + (f" at node {at}" if at else ""))
    if not bool((x > above).all()):
        raise ValueError(f"{what} of {name} must be {'positive' if above >= 0 else 'at least 0'}, not {float(x.min())}")


Simulation.__init__ = names_nearest(Simulation.__init__)
