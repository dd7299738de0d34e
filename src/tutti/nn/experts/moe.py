"""A mixture-of-experts feed-forward layer, dropless or with a capacity, usable in any model.

    y = sum over a token's k experts e of weight_e * FFN_e(x)  +  the shared experts' FFN(x)
    FFN(x) = down (act(gate) * up),  (gate, up) = the halves of gate_up x

Dropless: every choice is computed (`tutti.nn.experts.experts`). With a capacity factor, each expert takes at most
ceil(S k / E * factor) tokens of each sequence of S tokens, in the order of `tutti.nn.experts.slots`; dropped tokens get
nothing
from it, and the experts' products have a fixed shape. Shared experts see every token (Dai et al., "DeepSeekMoE", 2024).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutti.nn.activation import activation_of
from tutti.nn.experts.experts import experts
from tutti.nn.experts.router import Router
from tutti.nn.experts.slots import ops


class Auxiliary(NamedTuple):
    """Losses of a call, to be added with a factor (Switch: 0.01 balance; ST-MoE: 0.001 z), the load of each expert
    (E,), and the fraction of dropped choices. All float32."""

    balance: Tensor
    z: Tensor
    load: Tensor
    dropped: Tensor


class MoE(nn.Module):
    """A mixture of `experts` gated feed-forward networks; each token is routed to `top_k` of them.

    intermediate: inner width of an expert. capacity_factor: None for dropless. shared: number of shared experts,
    computed as one network of that many times the width. activation: see `tutti.nn.activation`. scores, normalize,
    bias_update: see `tutti.nn.experts.router`. The router computes in float32, the experts in the dtype of their
    parameters. Raises ValueError for a capacity_factor that is not positive, and for arguments that the router rejects.

        >>> layer = MoE(hidden=16, intermediate=32, experts=4, top_k=2)
        >>> y, aux = layer(torch.randn(2, 8, 16))
        >>> loss = y.square().mean() + 0.01 * aux.balance + 0.001 * aux.z
        >>> y.shape, int(aux.load.sum())
        (torch.Size([2, 8, 16]), 32)
    """

    def __init__(
        self, hidden: int, intermediate: int, experts: int, top_k: int, *, capacity_factor: float | None = None,
        shared: int = 0, activation: str = "silu", scores: str = "softmax", normalize: bool = True,
        bias_update: float = 0.0, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor}: it must be greater than 0, or None for dropless")
        self.activation, self.capacity_factor, self.act = activation, capacity_factor, activation_of(activation)
        factory = {"device": device, "dtype": dtype}
        self.router = Router(
            hidden, experts, top_k, scores=scores, normalize=normalize, bias_update=bias_update, **factory
        )
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, **factory))
        self.down = nn.Parameter(torch.empty(experts, hidden, intermediate, **factory))
        self.shared_gate_up = nn.Linear(hidden, 2 * shared * intermediate, bias=False, **factory) if shared else None
        self.shared_down = nn.Linear(shared * intermediate, hidden, bias=False, **factory) if shared else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the experts, as `nn.Linear` does."""
        for weight in (self.gate_up, self.down):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> tuple[Tensor, Auxiliary]:
        """x (batch, sequence, hidden) -> y of the same shape and dtype, and an `Auxiliary`.

        Raises ValueError for x of another shape.
        """
        if x.ndim != 3 or x.shape[-1] != self.down.shape[1]:
            raise ValueError(f"x has the shape {tuple(x.shape)}; expected (batch, sequence, {self.down.shape[1]})")
        routing = self.router(x)
        if self.capacity_factor is None:
            rows = (x.flatten(0, 1), routing.index.flatten(0, 1), routing.weight.flatten(0, 1))
            y, dropped = experts(*rows, self.gate_up, self.down, self.activation).view_as(x), x.new_zeros(()).float()
        else:
            y, dropped = self._with_capacity(x, routing.index, routing.weight, self.capacity_factor)
        if self.shared_gate_up is not None and self.shared_down is not None:
            y = y + self.shared_down(self._gated(self.shared_gate_up(x)))
        return y, Auxiliary(routing.balance, routing.z, routing.load, dropped)

    def _with_capacity(self, x: Tensor, index: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        (groups, tokens, hidden), (count, choices) = x.shape, (len(self.down), index.shape[-1])
        capacity = ceil(tokens * choices / count * factor)
        slot = ops.slots(index, count, capacity)
        buffer = ops.dispatch(x, slot, None, count, capacity).transpose(0, 1)
        rows = self._gated(torch.bmm(buffer.reshape(count, groups * capacity, hidden), self.gate_up.mT))
        buffer = torch.bmm(rows, self.down.mT).view(count, groups, capacity, hidden).transpose(0, 1)
        return ops.combine(buffer, slot, weight).to(x.dtype), (slot < 0).float().mean()

    def _gated(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, -1)
        return self.act.forward(gate) * up

    def extra_repr(self) -> str:
        how = "dropless" if self.capacity_factor is None else f"capacity_factor={self.capacity_factor}"
        return f"{self.down.shape[1]}, {self.down.shape[2]}, {how}, activation={self.activation!r}"
