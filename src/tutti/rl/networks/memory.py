"""Networks with a memory: a recurrent cell between an encoder and linear outputs.

    net = Network(lambda: Remembering(size, (64,), 32, "gru", {"policy": 3, "value": 1}))
    outputs, state = net(weights, obs, state)  # one step: obs (n, size), state (n, net.module.cell.state_width)
    outputs, states = net(weights, obs, state, first)  # a sequence: obs (time, n, size), states after each step

A state is one tensor, zeros at the beginning of an episode. `first` (time, n) tells where an episode begins. Between n
and features there may be a dim of agents.

Cells are those of `torch.nn.GRUCell` (Cho et al., 2014) and `torch.nn.LSTMCell` (Hochreiter and Schmidhuber, 1997). The
state of an LSTM is h and c, one after another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.rl.core.through_time import unroll
from tutti.rl.networks.networks import ACTIVATIONS, GAIN, mlp

GATES = {"gru": 3, "lstm": 4}


def gru(weights: tuple[Tensor, ...], state: Tensor, x: Tensor) -> Tensor:
    """The next state (..., width). x: what the inputs give to the gates, (..., 3 width)."""
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), F.linear(state, *weights).chunk(3, -1)
    reset, keep = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    return keep * state + (1 - keep) * (xn + reset * hn).tanh()


def lstm(weights: tuple[Tensor, ...], state: Tensor, x: Tensor) -> Tensor:
    """The next state (..., 2 width). x: (..., 4 width)."""
    h, c = state.chunk(2, -1)
    i, f, g, o = (x + F.linear(h, *weights)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return torch.cat([o.sigmoid() * c.tanh(), c], -1)


STEPS = {"gru": gru, "lstm": lstm}


class Cell(nn.Module):
    """A recurrent cell. kind: "gru" or "lstm". width: width of its output."""

    def __init__(self, inputs: int, width: int, kind: str):
        super().__init__()
        if kind not in GATES:
            raise ValueError(f"cell {kind!r} is not one of {', '.join(GATES)}")
        self.kind, self.width = kind, width
        self.inputs = nn.Linear(inputs, GATES[kind] * width)
        self.hidden = nn.Linear(width, GATES[kind] * width)
        for linear in (self.inputs, self.hidden):
            nn.init.orthogonal_(linear.weight)
            nn.init.zeros_(linear.bias)

    @property
    def state_width(self) -> int:
        return self.width * (2 if self.kind == "lstm" else 1)

    def forward(self, x: Tensor, state: Tensor, first: Tensor | None = None) -> Tensor:
        """States after a step, or after each step of a sequence."""
        gates, weights, step = self.inputs(x), (self.hidden.weight, self.hidden.bias), STEPS[self.kind]
        if first is None:
            return step(weights, state, gates)
        mask = (~first).to(gates.dtype).reshape(*first.shape, *[1] * (gates.ndim - 2))
        return unroll(lambda weights, state, gates, mask: step(weights, state * mask, gates), weights, state,
                      (gates, mask))  # fmt: skip


class Remembering(nn.Module):
    """features (..., size) to outputs by name, (..., width of the output), and states.

    hidden: widths of the encoder's layers. memory: width of the cell. gain: gains of the orthogonal first weights of
    outputs, by name; by default 1.
    """

    def __init__(self, size: int, hidden: tuple[int, ...], memory: int, kind: str, outputs: dict[str, int],
                 activation: str = "tanh", gain: dict[str, float] | None = None):  # fmt: skip
        super().__init__()
        *layers, last = (size, *hidden)
        self.encoder = mlp([*layers, last], activation, GAIN, GAIN) if layers else nn.Identity()
        self.cell, self.activation = Cell(last, memory, kind), ACTIVATIONS[activation]()
        self.outputs = nn.ModuleDict({name: nn.Linear(memory, n) for name, n in outputs.items()})
        for name, linear in self.outputs.items():
            nn.init.orthogonal_(linear.weight, (gain or {}).get(name, 1.0))  # pyright: ignore[reportArgumentType]
            nn.init.zeros_(linear.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor, state: Tensor, first: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        states = self.cell(self.activation(self.encoder(x)), state, first)
        seen = states[..., : self.cell.width]
        return {name: linear(seen) for name, linear in self.outputs.items()}, states


def begins(done: Tensor) -> Tensor:
    """Mask of steps that begin an episode, from those that end one (time, n). The first row, whose state is given, is
    False."""
    return torch.cat([torch.zeros_like(done[:1]), done[:-1]])
