"""Recurrent state-space models with discrete latents: what an agent imagines in (Hafner et al., 2023, 2301.04104).

    h_t = f(h_{t-1}, z_{t-1}, a_{t-1})      a gated recurrent cell
    z_t ~ q(z | h_t, x_t)                   posterior: what is seen
    z_t ~ p(z | h_t)                        prior: what is expected

z is `groups` one-hot vectors of `classes`, drawn with straight-through gradients; 1 % of each distribution is uniform.
From (h_t, z_t) the model predicts the observation x_t, and from f(h_t, z_t, a_t) the reward of a_t and whether the
episode goes on: these belong to the step, so that the last step of an episode is learned from as any other.

The loss is that of the predictions, and KL(sg q || p) + 0.1 KL(q || sg p), each at least 1 nat. Squared errors of
observations count `obs_coef` times: otherwise the KL outweighs the reconstruction of small
observations, and latents ignore them. (The paper's sums run over the 12,288 numbers of a picture.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tutti.rl.core import keys
from tutti.rl.core.through_time import unroll
from tutti.rl.networks.networks import Network, mlp
from tutti.rl.networks.two_hot import TwoHot, symlog

Tree = dict[str, Any]
FREE, UNIFORM, OF_POSTERIOR = 1.0, 0.01, 0.1


class WorldModel:
    """A model for observations of `size` features and actions of `width` numbers.

    deter: width of h. groups, classes: number of one-hot vectors in z, and of classes of each. hidden: width of layers.
    obs_coef: weight of errors of observations. Features of a state are (h, z), `self.features`.
    """

    def __init__(self, size: int, width: int, deter: int = 64, groups: int = 8, classes: int = 8, hidden: int = 64,
                 bins: int = 41, obs_coef: float = 10.0):  # fmt: skip
        self.obs_coef = obs_coef
        self.deter, self.groups, self.classes, self.latent = deter, groups, classes, groups * classes
        self.features = deter + self.latent
        self.two_hot = TwoHot(bins)
        self.net = Network(lambda: Parts(size, width, deter, groups * classes, hidden, bins))
        self.recurrent = [name for name in self.net.shapes if name.startswith(("into", "cell", "posterior"))]

    def init(self, seed: int) -> Tensor:
        return self.net.init(seed)

    # -- states -----------------------------------------------------------------------------------------------------

    def start(self, n: int) -> Tensor:
        """The state before an episode, (n, features): zeros."""
        return torch.zeros(n, self.features)

    def next(self, weights: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """h after an action, (..., deter)."""
        h, z = state.split([self.deter, self.latent], -1)
        return self.net(weights, "next", h, z, action)

    def expected(self, weights: Tensor, h: Tensor, gumbel: Tensor) -> Tensor:
        """The state (..., features) with a latent from the prior. gumbel: (..., groups, classes), see `noise`."""
        return torch.cat([h, self.drawn(self.net(weights, "prior", h), gumbel)], -1)

    def seen(self, weights: Tensor, h: Tensor, obs: Tensor, gumbel: Tensor) -> Tensor:
        """The state (..., features) with a latent from the posterior."""
        code = self.net(weights, "encoder", symlog(obs))
        return torch.cat([h, self.drawn(self.net(weights, "posterior", torch.cat([h, code], -1)), gumbel)], -1)

    def noise(self, key: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Gumbel numbers that draw latents, (*shape, groups, classes)."""
        return keys.gumbel(key, (*shape, self.groups, self.classes))

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probability of each class, (..., groups, classes)."""
        p = logits.unflatten(-1, (self.groups, self.classes)).softmax(-1)
        return ((1 - UNIFORM) * p + UNIFORM / self.classes).log()

    def drawn(self, logits: Tensor, gumbel: Tensor) -> Tensor:
        """One-hot latents (..., latent), whose gradient is that of the probabilities."""
        logs = self.log_probs(logits)
        one = ((logs + gumbel).argmax(-1, keepdim=True) == torch.arange(self.classes)).float()
        return (one + logs.exp() - logs.exp().detach()).flatten(-2)

    # -- predictions ------------------------------------------------------------------------------------------------

    def outcome(self, weights: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """(rewards, probabilities that the episode goes on) of the step to h, (...)."""
        return self.two_hot.mean(self.net(weights, "reward", h)), self.net(weights, "goes_on", h).squeeze(-1).sigmoid()

    def filtered(self, weights: Tensor, obs: Tensor, before: Tensor, first: Tensor, gumbel: Tensor) -> Tensor:
        """States (time, n, features) of sequences. before: the action before each observation. first: float32
        (time, n), 1 where an episode begins."""
        code = self.net(weights, "encoder", symlog(obs))
        named = self.net.named(weights)

        def step(
            params: tuple[Tensor, ...], state: Tensor, code: Tensor, action: Tensor, first: Tensor, gumbel: Tensor
        ):
            own = dict(zip(self.recurrent, params, strict=True))
            call = lambda *args: functional_call(self.net.module, own, args)  # noqa: E731
            going = 1 - first.unsqueeze(-1)
            h, z = (state * going).split([self.deter, self.latent], -1)
            h = call("next", h, z, action * going)
            return torch.cat([h, self.drawn(call("posterior", torch.cat([h, code], -1)), gumbel)], -1)

        params = tuple(named[name] for name in self.recurrent)
        return unroll(step, params, self.start(obs.shape[1]), (code, before, first, gumbel))

    def loss(self, weights: Tensor, rows: Tree, action: Tensor, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
        """(loss, (states (time, n, features), what to report)) of sequences of steps.

        rows: "obs", "reward", "terminated" and "truncated", (time, n, ...). action: as numbers, (time, n, width).
        """
        obs, ended = rows["obs"], rows["terminated"] | rows["truncated"]
        before = torch.cat([torch.zeros_like(action[:1]), action[:-1]])
        first = torch.cat([torch.ones_like(ended[:1]), ended[:-1]]).float()
        states = self.filtered(weights, obs, before, first, self.noise(key, tuple(ended.shape)))
        h = states[..., : self.deter]
        code = self.net(weights, "encoder", symlog(obs))
        posterior = self.log_probs(self.net(weights, "posterior", torch.cat([h, code], -1)))
        prior = self.log_probs(self.net(weights, "prior", h))
        expecting = divergence(posterior.detach(), prior).clamp(min=FREE).mean()
        seeing = divergence(posterior, prior.detach()).clamp(min=FREE).mean()
        picture = self.obs_coef * (self.net(weights, "decoder", states) - symlog(obs)).square().sum(-1).mean()
        after = self.next(weights, states, action)
        reward = self.two_hot.loss(self.net(weights, "reward", after), rows["reward"]).mean()
        logit = self.net(weights, "goes_on", after).squeeze(-1)
        goes_on = F.binary_cross_entropy_with_logits(logit, (~rows["terminated"]).float())
        metrics = {"obs_loss": picture, "reward_loss": reward, "end_loss": goes_on, "kl": expecting}
        total = picture + reward + goes_on + expecting + OF_POSTERIOR * seeing
        return total, (states.detach(), {name: x.detach() for name, x in metrics.items()})


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL of groups of classes, summed, (...). a, b: log-probabilities (..., groups, classes)."""
    return (a.exp() * (a - b)).sum((-2, -1))


class Parts(nn.Module):
    """The networks of a world model. Called with the name of one, and its inputs."""

    def __init__(self, size: int, width: int, deter: int, latent: int, hidden: int, bins: int):
        super().__init__()
        self.encoder = mlp([size, hidden, hidden], "silu", norm=True)
        self.into = nn.Linear(latent + width, hidden)
        self.cell = nn.Linear(deter + hidden, 3 * deter)
        self.prior = mlp([deter, hidden, latent], "silu", norm=True)
        self.posterior = mlp([deter + hidden, hidden, latent], "silu", norm=True)
        self.decoder = mlp([deter + latent, hidden, hidden, size], "silu", norm=True)
        self.reward = mlp([deter, hidden, hidden, bins], "silu", norm=True)
        self.goes_on = mlp([deter, hidden, 1], "silu", norm=True)
        for x in (self.reward[-1].weight, self.reward[-1].bias):
            nn.init.zeros_(x)  # type: ignore[arg-type]

    def next(self, h: Tensor, z: Tensor, action: Tensor) -> Tensor:
        x = F.silu(self.into(torch.cat([z, action], -1)))
        reset, candidate, update = self.cell(torch.cat([h, x], -1)).chunk(3, -1)
        share = (update - 1).sigmoid()
        return share * (reset.sigmoid() * candidate).tanh() + (1 - share) * h

    def forward(self, part: str, *args: Tensor) -> Tensor:
        return getattr(self, part)(*args)
