"""Callbacks between iterations of learning: evaluation, checkpoints, early ends, and TensorBoard.

    agent.learn(1_000_000, [EvalCallback(every=50_000, threshold=475), CheckpointCallback("out/ppo", every=100_000)])

A callback is any function of the agent; learning ends when one returns False.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tutti.checkpoint.array_file import write_arrays
from tutti.observe.board import Board
from tutti.rl.core import files
from tutti.rl.core.report import sb3_metrics
from tutti.rl.core.vector import VectorEnv

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent
    from tutti.rl.core.evaluate import Evaluation


class Every:
    """Calls `run(agent)` each time that so many steps more have been done."""

    def __init__(self, every: int):
        if isinstance(every, bool) or every < 1 or int(every) != every:
            raise ValueError(f"every is {every}; it must be a whole number of steps, at least 1")
        self.every = self.next = int(every)

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
    replaced by a better one only. threshold: learning ends at this mean return. deterministic: take the most likely
    action. env: to evaluate in, or a function that makes it.

    The names of Stable-Baselines3: `EvalCallback(eval_env, eval_freq=..., n_eval_episodes=...)`, where `eval_freq`
    counts steps of each environment; `best_model_save_path`, a folder for `best_model.safetensors`; `log_path`, one
    for `evaluations.npz`; `verbose`, which prints each evaluation.

    evaluations: list of (steps, `Evaluation`).
    """

    def __init__(self, every: Any = None, episodes: int | None = None, threshold: float | None = None,
                 best: str | Path | None = None, env: Any = None, *, eval_env: Any = None, eval_freq: int | None = None,
                 n_eval_episodes: int | None = None, best_model_save_path: str | Path | None = None,
                 log_path: str | Path | None = None, deterministic: bool = True, verbose: int = 0,
                 **extras: Any):  # fmt: skip
        _refuse("EvalCallback", extras, {"render": (False,), "warn": (True, False)})
        if every is not None and (isinstance(every, bool) or not isinstance(every, int | float)):
            eval_env, every = _one("env", every, "eval_env", eval_env), None
        self.each = _one("every", every, "eval_freq", eval_freq)  # in steps of each environment, if by its other name
        self.by_env = eval_freq is not None
        super().__init__(10_000 if self.each is None else self.each)
        self.episodes = _one("episodes", episodes, "n_eval_episodes", n_eval_episodes) or (5 if self.by_env else 10)
        if self.episodes < 1:
            raise ValueError(f"episodes is {self.episodes}; it must be at least 1")
        best_file = None if best_model_save_path is None else Path(best_model_save_path) / "best_model.safetensors"
        self.threshold, self.best = threshold, _one("best", best, "best_model_save_path", best_file)
        self.env, self.deterministic, self.verbose = _one("env", env, "eval_env", eval_env), deterministic, verbose
        self.log = None if log_path is None else Path(log_path) / "evaluations.npz"
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.highest = float("-inf")

    def begin(self, agent: Agent) -> None:
        if self.by_env:
            self.every = self.each * agent.config.n_envs
        super().begin(agent)
        if self.env is None and agent.env_name is None and isinstance(agent.env, VectorEnv):
            raise ValueError(f"{agent.env.name} was not given by name: pass EvalCallback(env=), an environment of its "
                             "own or a function that makes one")  # fmt: skip
        if self.best is not None and Path(self.best).exists():
            self.highest = max(self.highest, files.score(Path(self.best), agent))

    def run(self, agent: Agent) -> bool | None:
        env = self.env() if callable(self.env) else self.env
        evaluation = agent.evaluate(self.episodes, self.deterministic, env)
        self.evaluations.append((agent.num_timesteps, evaluation))
        if self.verbose:
            print(f"{agent.num_timesteps:,} steps: {evaluation}", flush=True)
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            steps, each = zip(*self.evaluations, strict=True)
            write_arrays(self.log, timesteps=np.array(steps), results=np.stack([x.returns for x in each]),
                         ep_lengths=np.stack([x.lengths for x in each]))  # fmt: skip
        if self.best is not None and evaluation.mean > self.highest:
            self.highest = evaluation.mean
            agent.save(self.best, score=evaluation.mean)
        return False if self.threshold is not None and evaluation.mean >= self.threshold else None


class CheckpointCallback(Every):
    """Save every so many steps to `folder/steps-00100000.safetensors`, and keep the last `keep` files; None: all.

    The names of Stable-Baselines3: `CheckpointCallback(save_freq=..., save_path=...)`, where `save_freq` counts steps
    of each environment, and all files are kept. Files hold the replay.
    """

    def __init__(self, folder: str | Path | None = None, every: int | None = None, keep: int | None = 3, *,
                 save_freq: int | None = None, save_path: str | Path | None = None, **extras: Any):  # fmt: skip
        _refuse("CheckpointCallback", extras, {"name_prefix": ("rl_model",), "save_replay_buffer": (True,),
                                               "save_vecnormalize": (True, False), "verbose": (0, 1, 2)})  # fmt: skip
        place = _one("folder", folder, "save_path", save_path)
        if place is None:
            raise ValueError("CheckpointCallback needs a folder, here folder= and there save_path=")
        self.each, self.by_env = _one("every", every, "save_freq", save_freq), save_freq is not None
        super().__init__(100_000 if self.each is None else self.each)
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1, or None to keep all files")
        self.folder, self.keep = Path(place), None if self.by_env else keep

    def begin(self, agent: Agent) -> None:
        if self.by_env:
            self.every = self.each * agent.config.n_envs
        super().begin(agent)

    def run(self, agent: Agent) -> None:
        agent.save(self.folder / f"steps-{agent.num_timesteps:010d}.safetensors")
        for old in checkpoints(self.folder)[: -self.keep] if self.keep else ():
            old.unlink()


def _one(name: str, x: Any, alias: str, y: Any) -> Any:
    """The value of an option with two names."""
    if x is not None and y is not None:
        raise ValueError(f"{name} and {alias} are the same option; leave one of them out")
    return y if x is None else x


def _refuse(kind: str, options: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for options that have no meaning here, unless their values change nothing."""
    for name, x in options.items():
        if x not in neutral.get(name, ()):
            raise ValueError(f"{kind} does not know {name}={x!r}; see help(tutti.rl.{kind})")


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
        self.board = Board(Path(folder))

    def run(self, agent: Agent) -> None:
        for name, x in sb3_metrics(agent).items():
            self.board.add_scalar(name, x, agent.num_timesteps)
        self.board.flush()


class Curve:
    """Notes (steps, mean return of the last 100 episodes) after each iteration in `points`."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def begin(self, agent: Agent) -> None:
        """Drop points of an interrupted run that are later than the checkpoint it continues from."""
        self.points = [point for point in self.points if point[0] <= agent.num_timesteps]

    def __call__(self, agent: Agent) -> None:
        if agent.episodes:
            self.points.append((agent.num_timesteps, statistics.fmean(r for r, _ in agent.episodes)))
