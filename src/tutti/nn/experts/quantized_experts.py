"""The experts of a mixture with quantized weights, which are not trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tutti.nn.experts import linear_experts
from tutti.nn.quantized.quantized_linear import Quantized, QuantizedLinear

ops = torch.ops.tutti


class StackedLinear(Quantized):
    """Linear layers of several experts with weights of one scheme and shape, stacked.

    layers: quantized layers, of which none is changed. load: whether to copy their weights. Raises ValueError for
    layers of several schemes or shapes.
    """

    q: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[QuantizedLinear], load: bool):
        super().__init__()
        self.count, first = len(layers), layers[0]
        alike = {(x.scheme, x.shape, x.dtype, x.bias is None) for x in layers}
        if len(alike) > 1 or first.input_scale is not None:
            raise ValueError("experts have weights of several schemes or shapes, or inputs with calibrated scales")
        self.scheme, self.layout, self.dtype, self.shape = first.scheme, first.layout, first.dtype, first.shape
        self._layer = [first]  # not a submodule
        for name in ("q", "scales", "zeros", "bias"):
            parts = [getattr(x, name) for x in layers]
            stacked = None
            if parts[0] is not None:
                whole = torch.stack(parts) if load else parts[0].new_empty(len(parts), *parts[0].shape)
                stacked = nn.Parameter(whole, requires_grad=False)
            self.register_parameter(name, stacked)

    @property
    def layer(self) -> QuantizedLinear:
        """The layer of the first expert."""
        return self._layer[0]

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """x (m, k), expert (m) -> (m, n)."""
        y = ops.linear_experts(x, expert, self.q, self.scales, self.zeros, layout=self.layout, bits=self.scheme.bits,
                               rounded=self.scheme.activations == "int8")  # fmt: skip
        return y if self.bias is None else y + self.bias[expert]


class QuantizedExperts(nn.Module):
    """Experts whose tokens are multiplied by the weights of their own experts only.

    gated: makes the inputs of `down` of the results (m, f) of `gate` and `up`.
    """

    def __init__(self, gate: StackedLinear, up: StackedLinear, down: StackedLinear,
                 gated: Callable[[Tensor, Tensor], Tensor]):  # fmt: skip
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.gated = [gated]  # not a submodule

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (tokens, h), top_k_index and top_k_weights (tokens, k) -> (tokens, h)."""
        (tokens, k), expert = top_k_index.shape, top_k_index.flatten()
        rows = hidden_states.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
        rows = self.gated[0](self.gate_proj(rows, expert), self.up_proj(rows, expert))
        y = self.down_proj(rows, expert).unflatten(0, (tokens, k)) * top_k_weights.unsqueeze(2)
        return y.sum(1).to(hidden_states.dtype)


assert linear_experts  # registers the operator
