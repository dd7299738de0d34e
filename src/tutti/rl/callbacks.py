"""What can be done between iterations of learning: evaluation, checkpoints, early ends, and TensorBoard.

    agent.learn(1_000_000, [EvalCallback(every=50_000, threshold=475), CheckpointCallback("out/ppo", every=100_000)])

A callback is any function of the agent; learning ends when one returns False.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.rl import files
from tutti.rl.vector import VectorEnv

if TYPE_CHECKING:
    from tutti.rl.agent import Agent, Evaluation


class Every:
    """Calls `run(agent)` each time that so many steps more have been done."""

    def __init__(self, every: int):
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1 step")
        self.every, self.next = every, every

    def begin(self, agent: Agent) -> None:
        """Called before the first iteration of `Agent.learn`."""
        self.due_after(agent.num_timesteps)

    def due_after(self, steps: int) -> None:
        """Run next at the first multiple of `every` after so many steps."""
        self.next = (steps // self.every + 1) * self.every

    def __call__(self, agent: Agent) -> bool | None:
        if agent.num_timesteps < self.next:
            return None
        self.due_after(agent.num_timesteps)
        return self.run(agent)

    def run(self, agent: Agent) -> bool | None:
        raise NotImplementedError


class EvalCallback(Every):
    """Evaluate every so many steps. best: a file for the best agent; one that an earlier part of the same run wrote is
    replaced by a better one only. threshold: learning ends at this mean return.

    evaluations: list of (steps, `Evaluation`).
    """

    def __init__(self, every: int = 10_000, episodes: int = 10, threshold: float | None = None,
                 best: str | Path | None = None, env: Any = None):  # fmt: skip
        super().__init__(every)
        self.episodes, self.threshold, self.best, self.env = episodes, threshold, best, env
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.highest = float("-inf")

    def begin(self, agent: Agent) -> None:
        super().begin(agent)
        if self.env is None and agent.env_name is None and isinstance(agent.env, VectorEnv):
            raise ValueError(f"{agent.env.name} was not given by name: pass EvalCallback(env=), a VectorEnv of its own "
                             "or a function that makes one")  # fmt: skip
        if self.best is not None and Path(self.best).exists():
            self.highest = max(self.highest, files.score(Path(self.best), agent))

    def run(self, agent: Agent) -> bool | None:
        found = agent.evaluate(self.episodes, env=self.env() if callable(self.env) else self.env)
        self.evaluations.append((agent.num_timesteps, found))
        if self.best is not None and found.mean > self.highest:
            self.highest = found.mean
            agent.save(self.best, score=found.mean)
        return False if self.threshold is not None and found.mean >= self.threshold else None


class CheckpointCallback(Every):
    """Save every so many steps to `folder/steps-00100000.safetensors`, and keep the last `keep` files."""

    def __init__(self, folder: str | Path, every: int = 100_000, keep: int = 3):
        super().__init__(every)
        self.folder, self.keep = Path(folder), keep

    def run(self, agent: Agent) -> None:
        agent.save(self.folder / f"steps-{agent.num_timesteps:010d}.safetensors")
        for old in checkpoints(self.folder)[: -self.keep]:
            old.unlink()


def checkpoints(folder: str | Path) -> list[Path]:
    """The files of `CheckpointCallback`, oldest first."""
    return sorted(Path(folder).glob("steps-*.safetensors"))


class StopOnReturn:
    """Ends learning when the mean return of the last 100 training episodes reaches a threshold."""

    def __init__(self, threshold: float, episodes: int = 100):
        self.threshold, self.episodes = threshold, episodes

    def __call__(self, agent: Agent) -> bool | None:
        last = [r for r, _ in agent.episodes][-self.episodes :]
        return False if len(last) == self.episodes and statistics.fmean(last) >= self.threshold else None


class TensorBoard(Every):
    """Writes metrics for TensorBoard to a folder."""

    def __init__(self, folder: str | Path, every: int = 1_000):
        super().__init__(every)
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def run(self, agent: Agent) -> None:
        steps = agent.num_timesteps
        if agent.episodes:
            returns, lengths = zip(*agent.episodes, strict=True)
            self.writer.add_scalar("rollout/ep_rew_mean", statistics.fmean(returns), steps)
            self.writer.add_scalar("rollout/ep_len_mean", statistics.fmean(lengths), steps)
        for name, value in agent.metrics.items():
            self.writer.add_scalar("time/fps" if name == "steps_per_second" else f"train/{name}", value, steps)
        self.writer.flush()


class Curve:
    """Notes (steps, mean return of the last 100 episodes) after each iteration in `points`."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def __call__(self, agent: Agent) -> None:
        if agent.episodes:
            self.points.append((agent.num_timesteps, statistics.fmean(r for r, _ in agent.episodes)))
