"""Training under a placement: in one process, or in a job of several that continues when one of them is killed.

A job saves the agent and what all ranks hold before it reports anything. When a process ends, the launcher starts all
processes again; they continue from the last state, with equal numbers where the placement is synchronous and the
environments are pure. Nothing that was reported is lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint.tensor_file import write_tensors
from tutti.rl.core import files
from tutti.rl.core.agent import Agent
from tutti.rl.core.callbacks import Every, checkpoints
from tutti.rl.core.driver import drive
from tutti.rl.placement.exchange import Lost, send_to_all
from tutti.rl.placement.exchange import receive as received
from tutti.rl.placement.placement import Placed
from tutti.rl.placement.ranks import process, processes

KEEP = 2  # states
REPORTED = "reported"  # the file with the steps of the last state that was reported


@dataclass(frozen=True)
class RunPlacement:
    """Where a run's fragments run: a placement, its ranks, and the processes that they are shared out among.

    Saved as JSON by `tutti plan --rl --save`; `tutti rl train --plan` reads it.
    """

    placement: str = "fused"
    ranks: int = 1
    processes: int = 1

    def __str__(self) -> str:
        if self.ranks == 1:
            return self.placement
        where = f"in {self.processes} processes" if self.processes > 1 else "in one process"
        return f"{self.placement}, {self.ranks} ranks{'' if self.placement == 'environments' else ' ' + where}"

    @staticmethod
    def load(path: Path) -> RunPlacement:
        """Load a placement from a file. Raises ValueError for unknown keys."""
        try:
            table = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"there is no file {path}; tutti plan --rl ... --save writes one") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a placement: {error}") from None
        place = table.get("place") if isinstance(table, dict) else None
        if not isinstance(place, dict) or (unlike := place.keys() - RunPlacement.__dataclass_fields__.keys()):
            names = ", ".join(RunPlacement.__dataclass_fields__)
            raise ValueError(f'{path} is not a placement: it needs "place" with {names}'
                             f"{f', not {sorted(unlike)[0]}' if isinstance(place, dict) else ''}")  # fmt: skip
        for name, kind in (("placement", str), ("ranks", int), ("processes", int)):
            x: Any = place.get(name, getattr(RunPlacement, name))
            if type(x) is not kind or (kind is int and int(x) < 1):
                wants = "a text" if kind is str else "a whole number from 1 on"
                raise ValueError(f"{path} is not a placement: {name} is {x!r}; it must be {wants}")
        return RunPlacement(**place)


def train(placed: Placed, steps: int, every: Sequence[int], folder: Path,
          callbacks: Sequence[Callable[[Agent], Any]], stops: Callable[[], bool] = lambda: False) -> None:  # fmt: skip
    """Learn up to `steps`, from the last state in the folder if there is one.

    every: intervals, in steps. At each multiple of one the state is saved, and then the callbacks are called, in
    process 0; after a restart they are called for a state whose report was not complete. Learning ends when one returns
    False, and at such a multiple when `stops` is true in process 0.
    """
    resume(placed, folder)
    report_file = folder / REPORTED
    reported = int(_of_first(torch.tensor(_steps_in(report_file))))
    for callback in callbacks:
        if hasattr(callback, "begin"):
            callback.begin(placed.agent)
        if isinstance(callback, Every):
            callback.due_after(reported)

    def report() -> bool:
        if placed.num_timesteps <= reported:
            return True
        goes_on = process() or all([callback(placed.agent) is not False for callback in callbacks])
        if not _of_first(torch.tensor(bool(goes_on))):
            return False
        if process() == 0:
            report_file.write_text(str(placed.num_timesteps))
        return not _of_first(torch.tensor(stops()))

    def step() -> None:
        end = min(steps, *((placed.num_timesteps // each + 1) * each for each in every))
        try:
            placed.learn(end - placed.num_timesteps, schedule=steps)
            save(placed, folder)
        except Lost as lost:
            ranks = placed.ranks // processes()
            first, last = lost.source * ranks, (lost.source + 1) * ranks - 1
            own = f"rank {first}" if ranks == 1 else f"ranks {first} to {last}"
            print(f"lost {own} after {placed.num_timesteps:,} steps: {lost}", file=sys.stderr, flush=True)
            raise

    if report():
        drive(placed, steps, step, report)


def _steps_in(path: Path) -> int:
    """The number of steps in a file, or 0 without one."""
    if not path.exists():
        return 0
    try:
        return int(path.read_bytes().decode("ascii"))
    except ValueError:
        raise ValueError(f"{path} does not hold a number of steps; delete it to report its last state again") from None


def _of_first(x: torch.Tensor) -> torch.Tensor:
    """The tensor of process 0, in all processes."""
    if process():
        return received({"x": x}, 0)["x"]
    send_to_all({"x": x})
    return x


def save(placed: Placed, folder: Path) -> None:
    """Write the state: what all ranks hold, then the agent, whose file says that both are complete."""
    state = placed.state()
    if process():
        return
    path = _path(folder, placed.num_timesteps)
    if state:
        write_tensors(state, beside(path))
    placed.agent.save(path)
    for old in checkpoints(folder)[:-KEEP]:
        old.unlink()
        beside(old).unlink(missing_ok=True)


def resume(placed: Placed, folder: Path) -> None:
    """Continue from the last state in a folder that is whole, if there is one. Process 0 chooses it for all."""
    paths = checkpoints(folder)
    partners = any(beside(path).exists() for path in paths)  # then every state has two files

    def read(path: Path) -> tuple[files.Saved, dict[str, torch.Tensor]]:
        return files.whole(path), files.tensors(beside(path)) if partners else {}

    newest = files.newest(paths, read) if process() == 0 else None
    steps = int(_of_first(torch.tensor(int(newest[0].path.stem.rpartition("-")[2]) if newest else -1)))
    if steps < 0:
        return
    path = _path(folder, steps)
    placed.restore(*(newest or read(path)), beside(path))
    if process() == 0:
        print(f"continuing after {placed.num_timesteps:,} steps", flush=True)


def _path(folder: Path, steps: int) -> Path:
    """The file of the agent after so many steps."""
    return folder / f"steps-{steps:010d}.safetensors"


def beside(path: Path) -> Path:
    """The file of what the ranks hold."""
    return path.with_name(path.name.replace("steps-", "ranks-"))
