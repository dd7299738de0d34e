"""Reports of learning: a progress line, callbacks, and files that TensorBoard reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.launch.progress import progress
from tutti.observe.board import Board
from tutti.rl.sb3 import callbacks

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent, Callback


@contextmanager
def reporting(agent: Agent, callback: Callback | Iterable[Callback] | None, bar: bool, every: int | None = None,
              name: str | None = None) -> Iterator[Callable[[], bool]]:  # fmt: skip
    """Yield a function to call after each iteration, which returns whether learning goes on.

    every: iterations or episodes between two logs. name: name of TensorBoard's run.
    """
    hooks = callbacks(callback)
    if agent.verbose or agent.tensorboard_log is not None:
        hooks.append(Log(agent, every, name))
    for each in hooks:
        if hasattr(each, "begin"):
            each.begin(agent)  # pyright: ignore[reportFunctionMemberAccess]
    begun, first = time.perf_counter(), agent.num_timesteps
    with progress("learning") as tell:

        def report() -> bool:
            if bar:
                pace = _pace(agent, agent.num_timesteps - first, time.perf_counter() - begun)
                tell.count(agent.num_timesteps, agent.total, pace)
            return all([each(agent) is not False for each in hooks])

        yield report


class Log:
    """Logger for `verbose` and `tensorboard_log`, every so many iterations, or episodes of algorithms with a replay."""

    def __init__(self, agent: Agent, every: int | None, name: str | None):
        self.by_episodes = hasattr(agent, "make_replay")
        self.every = every or (4 if self.by_episodes else 1)
        self.iterations, self.next = 0, self.every
        self.next += agent.episodes_done if self.by_episodes else 0
        logs = None if agent.tensorboard_log is None else Path(agent.tensorboard_log)
        self.board = None if logs is None else Board(_run(logs, name or type(agent).__name__))

    def __call__(self, agent: Agent) -> None:
        self.iterations += 1
        if (agent.episodes_done if self.by_episodes else self.iterations) < self.next:
            return
        self.next = (agent.episodes_done if self.by_episodes else self.iterations) + self.every
        table = sb3_metrics(agent)
        if self.board is not None:
            for name, x in table.items():
                self.board.add_scalar(name, x, agent.num_timesteps)
            self.board.flush()
        if agent.verbose:
            rows = {**table, "time/iterations": self.iterations, "time/total_timesteps": agent.num_timesteps}
            width = max(map(len, rows))
            print("\n".join(f"| {name:{width}} | {x:<11.6g} |" for name, x in rows.items()), flush=True)
            print("-" * (width + 18), flush=True)


def _run(folder: Path, name: str) -> Path:
    """A new folder: the name with its next free number."""
    numbers = [int(x.name.rpartition("_")[2]) for x in folder.glob(f"{name}_*") if x.name.rpartition("_")[2].isdigit()]
    return folder / f"{name}_{max(numbers, default=0) + 1}"


def sb3_metrics(agent: Agent) -> dict[str, float]:
    """Metrics under the names of Stable-Baselines3."""
    metrics: dict[str, float] = {}
    if agent.episodes:
        returns, lengths = zip(*agent.episodes, strict=True)
        metrics |= {"rollout/ep_rew_mean": statistics.fmean(returns), "rollout/ep_len_mean": statistics.fmean(lengths)}
    for name, x in agent.metrics.items():
        metrics["time/fps" if name == "steps_per_second" else f"train/{name}"] = x
    return metrics


def _pace(agent: Agent, steps: int, seconds: float) -> str:
    """The mean return of an agent and its speed."""
    mean = f"return {statistics.fmean(r for r, _ in agent.episodes):.1f}  " if agent.episodes else ""
    return f"{mean}{steps / seconds:,.0f} steps/s"
