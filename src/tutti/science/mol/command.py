"""The work of `tutti md`: a simulation as a config says, which goes on where it was interrupted."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from tutti.launch.interrupt import noted
from tutti.launch.launch import Interrupted, rank, world_size
from tutti.science.folder import differing, note
from tutti.science.mol import figures
from tutti.science.mol.config import MDConfig
from tutti.science.mol.dynamics.decomposed import DecomposedSimulation
from tutti.science.mol.dynamics.log import Log, units_of
from tutti.science.mol.dynamics.minimize import Fire, largest_force, minimize
from tutti.science.mol.dynamics.restart import Restart, load, save
from tutti.science.mol.dynamics.simulation import Simulation
from tutti.science.mol.dynamics.trajectory import Trajectory
from tutti.science.mol.elements import NUMBERS
from tutti.science.mol.networks import saved
from tutti.science.mol.networks.potential import NetworkPotential
from tutti.science.mol.observables import RadialDistribution, standard_error
from tutti.science.mol.system import System

CONSOLE = Console(highlight=False, soft_wrap=True)
PATIENCE = timedelta(hours=1)  # a process may wait for another's minimisation or report
FEW = 40_000  # atoms of a process, below which two processes of one machine are slower than one
SMALL = 3000  # atoms below which one thread is faster than several


class _Stop:
    """A callback that ends a run between two steps once a signal came to one of its processes."""

    collective = True

    def __init__(self, received: list[int]) -> None:
        self.received, self.every = received, 10 if world_size() > 1 else 1

    def __call__(self, simulation: Simulation) -> None:
        if number := int(simulation.largest(self.received[0] if self.received else 0)):
            raise Interrupted(number)


def run(path: Path, out: str = "", steps: int = 0) -> None:
    """Run the simulation of a config in a folder, by default out/md/NAME. What the folder has goes on.

    steps: instead of the config's, to go on longer. The processes of a job share the simulation. Raises ValueError for
    a folder of another config.
    """
    if steps < 0:
        raise ValueError(f"--steps is {steps}; expected 1 or more, or 0 for those of the config")
    config, processes = MDConfig.load(path), world_size()
    folder = Path(out) if out else Path("out/md") / path.stem
    CONSOLE.quiet = rank() > 0
    if processes > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
    system, potential = config.build(path.parent)
    distribution = _distribution(config, system)
    network = potential.network if isinstance(potential, NetworkPotential) else None
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _same(config, folder, network)
        if not (folder / "restart.safetensors").exists():  # of a run that cannot go on
            for name in ("log.csv", f"trajectory.{config.output.format}"):
                (folder / name).unlink(missing_ok=True)
    if processes > 1:
        dist.barrier()
    if network is not None:
        CONSOLE.print(_network(network))
    small = processes > 1 or system.atoms * system.replicas < SMALL
    torch.set_num_threads(1 if small else torch.get_num_threads())
    restart = folder / "restart.safetensors"
    goes_on = restart.exists()
    if config.run.minimize and not goes_on:
        system = minimize(system, potential, 1e-3, config.run.minimize)
        force = largest_force(Simulation(system, potential, Fire(), guard=None))
        CONSOLE.print(f"minimised: the largest force is {force:.3g}")
    simulation = config.simulation(system, potential, shared=processes > 1)
    parts = [distribution] if distribution else []
    if goes_on:
        load(simulation, restart, parts)
        CONSOLE.print(f"{folder}: goes on at step {simulation.count:,}")
    else:
        simulation.thermalize(config.run.temperature)
    equilibrate, total = config.run.equilibrate, config.run.equilibrate + (steps or config.run.steps)
    if simulation.count >= total:
        CONSOLE.print(f"{folder}: the run is complete, {total:,} steps; --steps takes more")
        return
    size = f"{system.atoms:,} atoms" + (f", {system.replicas} replicas" if system.replicas > 1 else "")
    if isinstance(simulation, DecomposedSimulation):
        size += f", {processes} processes in a grid of {' x '.join(map(str, simulation.plan.grid))}"
        if simulation.plan.owned < FEW:
            CONSOLE.print(
                f"each process has {simulation.plan.owned:,.0f} atoms: on one machine, messages take longer than"
                f" processes save with fewer than about {FEW:,}"
            )
    CONSOLE.print(
        f"{size}, {total - simulation.count:,} steps of {config.run.dt:g}, {type(simulation.updater).__name__}"
    )
    begin, first = time.perf_counter(), simulation.count
    keep = [Restart(restart, config.output.restart, parts)] if config.output.restart else []
    with noted(signal.SIGINT, signal.SIGTERM) as received:
        try:
            if simulation.count < equilibrate:
                simulation.run(equilibrate - simulation.count, [*keep, _Stop(received)])
            calls = _callbacks(config, folder, distribution)
            simulation.run(total - simulation.count, [*calls, *keep, _Stop(received)])
        except Interrupted:
            save(simulation, restart, parts)
            CONSOLE.print(f"step {simulation.count:,}: saved; the same command goes on")
            raise
    save(simulation, restart, parts)
    seconds = time.perf_counter() - begin
    if rank():
        return
    report = _report(config, simulation, folder, seconds, first, distribution)
    figures.draw(folder)
    CONSOLE.print(f"{report['steps per second']:,.0f} steps/s; {_said(report)}")
    CONSOLE.print(f"wrote {', '.join(sorted(p.name for p in folder.iterdir() if p.is_file()))} in {folder}")


def _network(network: Any) -> str:
    """What the forces come from, with the error of its tables."""
    uncompiled = getattr(network, "network", network)
    text = f"forces of {type(uncompiled).__name__}"
    if uncompiled is network:
        return text + ", not compiled"
    error = max(x.tables.error for x in getattr(network, "members", [network]))
    return text + f", its filters in tables with a relative error of at most {error:.1e}"


def _same(config: MDConfig, folder: Path, network: Any) -> None:
    """Note the config in the folder, and see that it is the one of what is there. More steps are no other run."""
    tables = asdict(config)
    if network is not None:
        tables["network"] = {"weights": saved.digest(getattr(network, "network", network))}
    path = folder / "config.json"
    if (folder / "restart.safetensors").exists():
        differ = [name for name in differing(tables, path) if name.partition(".")[2] not in ("steps", "restart")]
        if differ:
            raise ValueError(
                f"{folder} has a run with another {', '.join(differ)}; choose another folder by --out, or remove it"
            )
    note(tables, path)


def _callbacks(config: MDConfig, folder: Path, distribution: RadialDistribution | None) -> list[Any]:
    out = config.output
    calls: list[Any] = []
    if out.log:
        calls.append(Log(folder / "log.csv", out.log, resume=True))
    if out.trajectory:
        path = folder / f"trajectory.{out.format}"
        calls.append(Trajectory(path, out.trajectory, out.velocities, resume=True))
    return [*calls, distribution] if distribution else calls


def _distribution(config: MDConfig, system: System) -> RadialDistribution | None:
    out, species = config.output, system.species
    if not out.rdf:
        return None
    if system.cell is None or not all(system.pbc):
        raise ValueError(
            "output.rdf needs a cell that repeats in three directions, which the system has not: leave it out"
        )
    kinds: list[Any] = [None, None]
    for k, symbol in enumerate(out.pairs):
        if symbol not in NUMBERS or not bool((species == NUMBERS[symbol]).any()):
            raise ValueError(f"output.pairs: the system has no atom of {symbol!r}")
        kinds[k] = (species == NUMBERS[symbol]).nonzero().flatten()
    return RadialDistribution(out.rdf, 200, out.log or 100, *kinds)


def _report(
    config: MDConfig, simulation: Simulation, folder: Path, seconds: float, first: int,
    distribution: RadialDistribution | None,
) -> dict[str, Any]:  # fmt: skip
    steps = simulation.count - first
    report: dict[str, Any] = {
        "atoms": simulation.atoms, "replicas": simulation.system.replicas, "steps": simulation.count,
        "seconds": seconds, "steps per second": steps / seconds, "threads": torch.get_num_threads(),
        "processes": world_size(), "neighbor lists": simulation.builds, "units": units_of(simulation.system.units),
    }  # fmt: skip
    if config.output.log:
        series = figures.columns(folder / "log.csv")
        for name in ("potential", "temperature", "pressure", "volume"):
            values = series.get(name)
            if values is not None and len(values) > 1:
                report[name] = {"mean": float(values.mean()), "error": standard_error(values)}
        conserved = series.get("conserved")
        if conserved is not None and len(conserved) > 1:
            report["drift per atom"] = float((conserved[-1] - conserved[0]).abs()) / simulation.atoms
    if distribution and distribution.configurations:
        error = distribution.error.tolist() if len(distribution.each) >= distribution.blocks else None
        table = {
            "r": distribution.r.tolist(),
            "g": distribution.g.tolist(),
            "error": error,
            "configurations": distribution.configurations,
        }
        (folder / "rdf.json").write_text(json.dumps(table) + "\n")
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _said(report: dict[str, Any]) -> str:
    unit = {name: f" {label}" for name, label in report["units"].items()}
    parts = [f"{name} {report[name]['mean']:.5g} +- {report[name]['error']:.1g}{unit.get(name, '')}"
             for name in ("temperature", "potential", "pressure") if name in report]  # fmt: skip
    if "drift per atom" in report:
        parts.append(
            f"drift of the conserved energy {report['drift per atom']:.2g}{unit.get('conserved', '')} per atom"
        )
    return ", ".join(parts) or f"{report['steps']:,} steps"
