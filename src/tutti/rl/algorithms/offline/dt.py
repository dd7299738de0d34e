"""Decision Transformer (Chen et al., 2021, arXiv 2106.01345): actions as the continuation of a sequence.

A causal transformer reads (return to go, observation, action) of the last `context` steps, and predicts each action
from all that precedes it. Learning is supervised, as in `BC`; acting asks for `target_return`, and subtracts the
rewards that come: those that `collect` writes to the carry.

Tokens are linear embeddings, plus one of the step's place in the context (in the paper, of its place in the episode).
Returns to go are divided by `scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.rl.algorithms.families.offline import Offline
from tutti.rl.core import keys
from tutti.rl.core.agent import Rate
from tutti.rl.core.descent import Adam
from tutti.rl.dataset import Rows, first_steps, returns_to_go
from tutti.rl.networks.distributions import Box, masked
from tutti.rl.networks.networks import Network

Tree = dict[str, Any]


class DT(Offline):
    """Options: `DT.Config`."""

    @dataclass(frozen=True)
    class Config(Offline.Config):
        """context: steps that the model sees. width, layers, heads: sizes of the transformer. target_return: return
        that is asked for; by default the largest in the data. scale: what returns to go are divided by; by default the
        largest absolute value of one."""

        learning_rate: Rate = 1e-3
        batch_size: int = 64
        normalize_obs: bool = True
        context: int = 20
        width: int = 64
        layers: int = 2
        heads: int = 2
        target_return: float | None = None
        scale: float | None = None
        decay: float = 1e-4
        max_grad_norm: float = 0.25

    squashed = True
    unused = (*Offline.unused, "gamma", "tau", "hidden", "activation")

    def build(self) -> None:
        c, d = self.config, self.distribution
        if c.width % c.heads:
            raise ValueError(f"width {c.width} is not a multiple of the {c.heads} heads")
        self.continuous = isinstance(d, Box)
        self.numbers = d.width if isinstance(d, Box) else d.size
        self.net = Network(lambda: Transformer(self.features.size, self.numbers, c))
        self.adam = Adam(decay=c.decay, clip=c.max_grad_norm)

    def init(self, seed: int) -> Tree:
        weights = self.net.init(seed)
        returns = self.rows_held["to_go"] if self.rows_held else torch.ones(1)
        best, size = returns.max(), returns.abs().max()
        c = self.config
        return {"weights": weights, "adam": self.adam.init(weights),
                "scale": size if c.scale is None else torch.tensor(c.scale),
                "target": best if c.target_return is None else torch.tensor(c.target_return)}  # fmt: skip

    def prepared(self, rows: Rows) -> Rows:
        whole = returns_to_go(rows)
        return {"obs": rows["obs"], "action": rows["action"], "to_go": whole, "first": first_steps(rows)}

    def policy(self, learner: Tree) -> Tree:
        return {name: learner[name] for name in ("weights", "scale", "target")}

    def as_numbers(self, action: Tensor) -> Tensor:
        """Actions as inputs of the model, float32 (..., numbers)."""
        if self.continuous:
            return action.flatten(-len(self.distribution.shape))
        return F.one_hot(action, self.numbers).float()

    # -- learning -------------------------------------------------------------------------------------------------

    def sample(self, rows: Rows, key: Tensor) -> Tree:
        """Windows (count, context, ...) of one episode each, and where they have "valid" steps: the last ones."""
        c, n = self.config, rows["to_go"].shape[0]
        last = keys.integers(key, (c.batch_size,), n)
        index = last.unsqueeze(-1) - torch.arange(c.context - 1, -1, -1)
        valid = index >= rows["first"][last].unsqueeze(-1)
        index = index.clamp(min=0)
        batch = {name: rows[name][index] for name in ("obs", "action", "to_go")}
        return {**batch, "valid": valid}

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        to_go, actions = batch["to_go"] / learner["scale"], self.as_numbers(batch["action"])

        def loss(weights: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.net(weights, to_go, batch["obs"], actions, batch["valid"])
            if self.continuous:
                each = (outputs.tanh() - actions).square().mean(-1)
            else:
                each = -self.distribution.log_prob(outputs, batch["action"])
            return (each * batch["valid"]).sum() / batch["valid"].sum(), each[:, -1].detach()

        gradient, (mean_loss, each) = torch.func.grad_and_value(loss, has_aux=True)(learner["weights"])
        weights, adam = self.adam.step(learner["weights"], gradient, learner["adam"], self.rate(learner))
        return {**learner, "weights": weights, "adam": adam}, each, {"loss": mean_loss}

    # -- acting ---------------------------------------------------------------------------------------------------

    def carry(self, n: int) -> Tree:
        """The last steps: what they saw, did, and had got before; "reward": reward of the last one."""
        length = self.config.context
        return {"obs": torch.zeros(n, length, self.features.size), "action": torch.zeros(n, length, self.numbers),
                "spent": torch.zeros(n, length), "valid": torch.zeros(n, length), "reward": torch.zeros(n)}  # fmt: skip

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        d, none = self.distribution, torch.zeros_like(carry["action"][:, 0])
        now = {"obs": seen["obs"], "action": none, "spent": carry["spent"][:, -1] + carry["reward"],
               "valid": torch.ones_like(carry["reward"])}  # fmt: skip
        steps = {name: torch.cat([carry[name][:, 1:], x.unsqueeze(1)], 1) for name, x in now.items()}
        to_go = (policy["target"] - steps["spent"]) / policy["scale"]
        outputs = self.net(policy["weights"], to_go, steps["obs"], steps["action"], steps["valid"] > 0)[:, -1]
        if self.continuous:
            action = outputs.tanh().unflatten(-1, d.shape)
        else:
            outputs = masked(outputs, seen.get("mask"))
            action = d.sample(outputs, key) if explore else d.mode(outputs)
        done = torch.cat([steps["action"][:, :-1], self.as_numbers(action).unsqueeze(1)], 1)
        return action, {}, {**steps, "action": done, "reward": torch.zeros_like(carry["reward"])}


class Transformer(nn.Module):
    """Outputs for the action of each step, (n, steps, numbers)."""

    def __init__(self, size: int, numbers: int, config: Any):
        super().__init__()
        width = config.width
        self.to_go, self.obs, self.action = nn.Linear(1, width), nn.Linear(size, width), nn.Linear(numbers, width)
        self.place = nn.Parameter(0.02 * torch.randn(config.context, width))
        self.blocks = nn.ModuleList(DecoderBlock(width, config.heads) for _ in range(config.layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, numbers)

    def forward(self, to_go: Tensor, obs: Tensor, action: Tensor, valid: Tensor) -> Tensor:
        """to_go, valid: (n, steps). obs, action: (n, steps, ...)."""
        steps = obs.shape[1]
        tokens = torch.stack([self.to_go(to_go.unsqueeze(-1)), self.obs(obs), self.action(action)], 2)
        x = (tokens + self.place[:steps].unsqueeze(1)).flatten(1, 2)
        place = torch.arange(3 * steps)
        causal, itself = place.unsqueeze(1) >= place, place.unsqueeze(1) == place
        mask = causal & (valid.repeat_interleave(3, 1).unsqueeze(1) | itself)  # (n, tokens, tokens)
        for block in self.blocks:
            x = block(x, mask.unsqueeze(1))
        return self.out(self.norm(x.unflatten(1, (steps, 3))[:, :, 1]))


class DecoderBlock(nn.Module):
    """Attention and a perceptron, each after a normalization and added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))
