"""Experts of a mixture as layers of their own.

`transformers` holds the weights of all experts in two tensors of three dims, which no format of quantized weights
knows: files have a weight for each expert. These modules have, too, so that experts are layers like others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAMES = "gate_proj", "up_proj", "down_proj"


class Expert(nn.Module):
    """One expert. join: makes of gate (m, f) and up (m, f) the (m, 2 f) that `act` takes."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module, act: Any, interleaved: bool):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.interleaved = interleaved
        self.act = [act]  # not a submodule

    def gated(self, x: Tensor) -> Tensor:
        """The inputs (m, f) of down_proj."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        joined = torch.stack([gate, up], -1).flatten(-2) if self.interleaved else torch.cat([gate, up], -1)
        return self.act[0](joined)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(x))


class ExpertLayers(nn.Module):
    """The experts of a mixture, each an `Expert`: `experts.3.down_proj` is a linear layer.

    dense: whether all tokens go through all experts, and what was not asked for is multiplied by 0: no shape depends
    on the values of tensors then, as capture needs.
    """

    dense = False

    def __init__(self, experts: Any):
        """experts: the module of `transformers` with all of them. Raises ValueError for one of another form."""
        super().__init__()
        check_experts(experts)
        turned, biased = experts.is_transposed, experts.has_bias
        interleaved = not experts.is_concatenated
        self.count = experts.num_experts
        plain = experts.__class__.__new__(experts.__class__)
        nn.Module.__init__(plain)
        plain.__dict__.update({k: v for k, v in experts.__dict__.items() if not k.startswith("_")})
        if hasattr(experts, "act_fn"):
            plain.act_fn = experts.act_fn

        def layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias, requires_grad=False)
            return linear

        def halves(x: Tensor) -> tuple[Tensor, Tensor]:
            return (x[::2], x[1::2]) if interleaved else (x[: len(x) // 2], x[len(x) // 2 :])

        for i in range(self.count):
            both, down = experts.gate_up_proj.data[i], experts.down_proj.data[i]
            both, down = (both.T, down.T) if turned else (both, down)
            of_both, of_down = ((experts.gate_up_proj_bias.data[i], experts.down_proj_bias.data[i])
                                if biased else (None, None))  # fmt: skip
            gate_bias, up_bias = (None, None) if of_both is None else halves(of_both)
            (gate, up), pair = halves(both), (gate_bias, up_bias)
            self.add_module(str(i), Expert(layer(gate, pair[0]), layer(up, pair[1]), layer(down, of_down),
                                           plain._apply_gate, interleaved))  # fmt: skip

    def __getitem__(self, i: int) -> Expert:
        return self.get_submodule(str(i))  # pyright: ignore[reportReturnType]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (tokens, h), top_k_index and top_k_weights (tokens, k) -> (tokens, h)."""
        if self.dense:
            shares = [(top_k_weights * (top_k_index == i)).sum(1, keepdim=True) for i in range(self.count)]
            return sum((self[i](hidden_states) * x).to(hidden_states.dtype) for i, x in enumerate(shares))  # pyright: ignore
        outputs = torch.zeros_like(hidden_states)
        for i in top_k_index.unique().tolist():
            if i < self.count:
                rows, place = torch.where(top_k_index == i)
                weighted = self[i](hidden_states[rows]) * top_k_weights[rows, place, None]
                outputs.index_add_(0, rows, weighted.to(outputs.dtype))
        return outputs


def is_experts(module: nn.Module) -> bool:
    """Whether a module of `transformers` has the weights of experts in tensors of three dims."""
    weight = getattr(module, "gate_up_proj", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 3 and hasattr(module, "down_proj")


def check_experts(module: nn.Module) -> None:
    """Raise ValueError for experts of a form that is not known."""
    readable = all(hasattr(module, x) for x in ("is_transposed", "has_bias", "is_concatenated", "_apply_gate"))
    if not readable or not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{type(module).__name__} has experts of a form that is not known: ignore them")
