"""Dueling networks (Wang et al., 2016): the value of a state and the advantages of actions have layers of their own.

Q(s, a) = V(s) + A(s, a) - mean_a A(s, a)
"""

from __future__ import annotations

from torch import Tensor, nn

from tutti.rl.algorithms.value.double_dqn import DoubleDQN
from tutti.rl.networks.networks import ACTIVATIONS, mlp


class DuelingDQN(DoubleDQN):
    """Options: `DQN.Config`."""

    cnn_hidden = (512,)

    def module(self) -> nn.Module:
        c = self.config
        return self.sighted(lambda size: Dueling(size, c.hidden, self.distribution.size, c.activation))


class Dueling(nn.Module):
    """atoms: outputs for each action; with more than one, the result is (..., actions, atoms)."""

    def __init__(self, size: int, hidden: tuple[int, ...], actions: int, activation: str, atoms: int = 1):
        super().__init__()
        *shared, last = hidden
        self.body = mlp([size, *shared, last], activation) if shared else nn.Identity()
        width = last if shared else size
        self.value = mlp([width, last, atoms], activation)
        self.advantage = mlp([width, last, actions * atoms], activation)
        self.atoms, self.activation = atoms, ACTIVATIONS[activation]()

    def forward(self, obs: Tensor) -> Tensor:
        x = self.body(obs)
        if isinstance(self.body, nn.Sequential):
            x = self.activation(x)
        value, advantage = self.value(x).unsqueeze(-2), self.advantage(x).unflatten(-1, (-1, self.atoms))
        q = value + advantage - advantage.mean(-2, keepdim=True)
        return q.squeeze(-1) if self.atoms == 1 else q
