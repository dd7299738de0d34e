"""Models of an environment's dynamics, learned from its transitions: ensembles of probabilistic networks.

Each member gives means and variances of a normal distribution over (change of the observation, reward), and the logit
of termination (Chua et al., 2018, arXiv 1805.12114). It descends the negative log-likelihood

    sum (y - mean)^2 / variance + log variance

of its own bootstrap batches, with inputs and outputs in units of their standard deviations in the data. Members agree
where there are data, and differ elsewhere: each step of a rollout uses one at random (trajectory sampling, TS1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tutti
from tutti.rl.core import keys
from tutti.rl.core.descent import Adam
from tutti.rl.core.normalize import over_ranks
from tutti.rl.networks.networks import Ensemble, mlp

Tree = dict[str, Any]
LOWEST, HIGHEST = -10.0, 1.0  # log variances, in units of the data's variance


class Dynamics:
    """An ensemble for observations of `size` features and actions of `width` numbers.

    members: number of networks of the ensemble. hidden: widths of hidden layers. lr, decay: learning rate and weight
    decay of AdamW.
    """

    def __init__(self, size: int, width: int, members: int = 5, hidden: tuple[int, ...] = (64, 64), lr: float = 1e-3,
                 decay: float = 1e-5):  # fmt: skip
        self.size, self.members = size, members
        self.net = Ensemble(lambda: mlp([size + width, *hidden, 2 * (size + 1) + 1], "silu"), members)
        self.adam = Adam(lr=lr, decay=decay)

    def init(self, seed: int) -> Tree:
        weights = self.net.init(seed)
        one = self.net.one.module[0].in_features  # type: ignore[index, union-attr]
        return {"weights": weights, "adam": self.adam.init(weights),
                "in_mean": torch.zeros(one), "in_std": torch.ones(one),
                "out_mean": torch.zeros(self.size + 1), "out_std": torch.ones(self.size + 1)}  # fmt: skip

    def scaled(self, model: Tree, rows: Tree, valid: Tensor) -> Tree:
        """The model with the statistics of rows (n, ...) that are `valid`, bool (n,)."""
        stats: Tree = {}
        for name, x in (("in", _inputs(rows["obs"], rows["action"])), ("out", _outputs(rows))):
            share = (valid.float() / valid.sum().clamp(min=1)).unsqueeze(-1)
            mean = (share * x).sum(0)
            mean, var = over_ranks(mean, (share * (x - mean).square()).sum(0))
            std = var.sqrt()
            stats |= {f"{name}_mean": mean, f"{name}_std": torch.where(std < 1e-6, 1.0, std)}
        return {**model, **stats}

    def fit(self, model: Tree, rows: Tree, size: Tensor, steps: int, batch_size: int, key: Tensor) -> tuple[Tree, Tree]:
        """Some steps of descent on the first `size` of the rows (n, ...). Returns the model and metrics."""
        x = (_inputs(rows["obs"], rows["action"]) - model["in_mean"]) / model["in_std"]
        y = (_outputs(rows) - model["out_mean"]) / model["out_std"]
        ended = rows["terminated"].float()

        def body(carry: tuple[Tensor, Tree], i: Tensor) -> tuple[tuple[Tensor, Tree], Tensor]:
            index = keys.integers(keys.fold(key, i), (self.members, batch_size), size)
            gradient, loss = torch.func.grad_and_value(self.loss)(carry[0], x[index], y[index], ended[index])
            return self.adam.step(carry[0], gradient, carry[1]), loss

        (weights, adam), losses = tutti.scan(body, (model["weights"], model["adam"]), torch.arange(steps))
        return {**model, "weights": weights, "adam": adam}, {"model_loss": losses[-1] / self.members}

    def loss(self, weights: Tensor, x: Tensor, y: Tensor, ended: Tensor) -> Tensor:
        """The sum over members of the mean negative log-likelihood. x, y: (members, count, ...), in their units."""
        mean, log_var, logit = self._parts(torch.vmap(self.net.one)(weights, x))
        normal = 0.5 * ((y - mean).square() * (-log_var).exp() + log_var).mean(-1)
        end = F.binary_cross_entropy_with_logits(logit, ended, reduction="none")
        return (normal + end).mean(-1).sum()

    def step(self, model: Tree, obs: Tensor, action: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(observations afterwards, rewards, terminated), drawn from a random member for each row."""
        of_member, of_noise, of_end = keys.split(key, 3)
        x = (_inputs(obs, action) - model["in_mean"]) / model["in_std"]
        member = keys.integers(of_member, obs.shape[:1], self.members)
        outputs = self.net(model["weights"], x)
        chosen = outputs.gather(0, member.view(1, -1, 1).expand(1, *outputs.shape[1:])).squeeze(0)
        mean, log_var, logit = self._parts(chosen)
        drawn = mean + (0.5 * log_var).exp() * keys.normal(of_noise, mean.shape)
        y = drawn * model["out_std"] + model["out_mean"]
        return obs + y[:, :-1], y[:, -1], keys.uniform(of_end, logit.shape) < logit.sigmoid()

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var, logit = outputs.split([self.size + 1, self.size + 1, 1], -1)
        log_var = HIGHEST - F.softplus(HIGHEST - log_var)
        return mean, LOWEST + F.softplus(log_var - LOWEST), logit.squeeze(-1)


def _inputs(obs: Tensor, action: Tensor) -> Tensor:
    return torch.cat([obs, action.flatten(1)], -1)


def _outputs(rows: Tree) -> Tensor:
    return torch.cat([rows["last"] - rows["obs"], rows["reward"].unsqueeze(-1)], -1)
