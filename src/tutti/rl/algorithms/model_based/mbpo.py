"""Model-based policy optimization (Janner et al., 2019, arXiv 1906.08253): SAC on steps that a model imagines.

Each iteration acts for some steps, fits an ensemble (`tutti.rl.networks.dynamics`) to all real steps, and lets the
policy act in it for `horizon` steps from states that it has really seen. SAC then learns from batches of both, with
many more updates for a real step than real steps alone would bear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tutti
from tutti.rl.algorithms.continuous.sac import SAC
from tutti.rl.core import keys
from tutti.rl.networks.dynamics import Dynamics
from tutti.rl.replay.ring import Ring, Shape

Tree = dict[str, Any]


class MBPO(SAC):
    """Options: `MBPO.Config`. Observations are not normalized: the model has its own scales."""

    @dataclass(frozen=True)
    class Config(SAC.Config):
        """members: number of networks of the ensemble. model_hidden: widths of their hidden layers. model_lr,
        model_batch_size: their learning rate and batch size. model_steps: their updates in each iteration. horizon:
        steps of an imagined rollout. rollouts: imagined rollouts of an iteration. retained: iterations whose rollouts
        are remembered. real_ratio: share of a batch that is real."""

        n_steps: int = 50
        gradient_steps: int = 500
        learning_starts: int = 400
        members: int = 5
        model_hidden: tuple[int, ...] = (64, 64)
        model_lr: float = 1e-3
        model_steps: int = 200
        model_batch_size: int = 128
        horizon: int = 3
        rollouts: int = 512
        retained: int = 10
        real_ratio: float = 0.1

    gaps = sees = pixels = False
    unused = (*SAC.unused, "hindsight")

    def build(self) -> None:
        c = self.config
        if c.normalize_obs:
            raise ValueError("MBPO does not normalize observations: its model has scales of its own; leave it out")
        super().build()
        self.model = Dynamics(self.features.size, self.distribution.width, c.members, c.model_hidden, c.model_lr)
        self.imagined = Ring(c.horizon * c.retained, c.rollouts)

    def init(self, seed: int) -> Tree:
        return {**super().init(seed), "model": self.model.init(seed + 7)}

    def more_state(self) -> Tree:
        shapes: dict[str, Shape] = {**self.row_shapes(), "weight": ((), torch.float32)}
        return {**super().more_state(), "imagined": self.imagined.init(shapes)}

    def absorb(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        c = self.config
        run, episodes = self.remember(run, chunk)
        of_fit, of_imagination = keys.split(keys.fold(run["key"], 1))
        replay, learner = run["replay"], run["learner"]
        rows = {name: x.flatten(0, 1) for name, x in replay["rows"].items()}
        size = replay["size"] * c.n_envs
        model = self.model.scaled(learner["model"], rows, torch.arange(rows["reward"].shape[0]) < size)
        model, fitted = self.model.fit(model, rows, size, c.model_steps, c.model_batch_size, of_fit)
        learner = {**learner, "model": model}
        imagined = self.imagined.add(run["imagined"], self.imagine(learner, replay, of_imagination))
        real = round(c.real_ratio * c.batch_size)

        def body(learner: Tree, i: Tensor) -> tuple[Tree, Tree]:
            of_real, of_dream, of_update = keys.split(keys.fold(run["key"], i + 3), 3)
            some, where = self.replay.sample(replay, of_real, real, c.gamma)
            more, _ = self.imagined.sample(imagined, of_dream, c.batch_size - real, c.gamma)
            both = {**some, "weight": where["weight"]}
            batch = {name: torch.cat([both[name], more[name]]) for name in both}
            learner, _, metrics = self.update(learner, batch, of_update)
            return learner, metrics

        learner, metrics = tutti.scan(body, learner, torch.arange(self.updates))
        run = {**run, "learner": learner, "imagined": imagined}
        return run, {**{name: x.mean() for name, x in metrics.items()}, **fitted, **episodes}

    def imagine(self, learner: Tree, replay: Tree, key: Tensor) -> Tree:
        """A chunk (horizon, rollouts, ...) of the policy in the model. weight: 0 after a termination."""
        c = self.config
        of_start, of_steps = keys.split(key)
        start, _ = self.replay.sample(replay, of_start, c.rollouts)
        policy, no = self.acting(learner), torch.zeros(c.rollouts, dtype=torch.bool)

        def body(carry: tuple[Tensor, Tensor], t: Tensor) -> tuple[tuple[Tensor, Tensor], Tree]:
            obs, going = carry
            of_act, of_model = keys.split(keys.fold(of_steps, t))
            action, _, _ = self.act(policy, {"obs": obs}, {}, of_act, True)
            last, reward, terminated = self.model.step(learner["model"], obs, action, of_model)
            row = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": no,
                   "last": last, "weight": going}  # fmt: skip
            return (last, going * ~terminated), row

        return tutti.scan(body, (start["obs"], torch.ones(c.rollouts)), torch.arange(c.horizon))[1]
