"""Quantized weights: linear layers of a served model in int8 or int4, rounded when they are loaded.

int8 has a scale for each output, int4 a scale for 64 inputs of an output (`tutti.nn.linear_int8`, `linear_int4`).
Activations stay in the model's dtype. Embeddings, norms and the output layer stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from tutti.nn.linear_int4 import BLOCK, quantize_int4
from tutti.nn.linear_int8 import quantize_int8

Quantize = Literal["", "int8", "int4"]
ops = torch.ops.tutti
KINDS: dict[str, tuple[Callable[[Tensor], tuple], Callable[..., Tensor]]] = {
    "int8": (quantize_int8, lambda x, q, scales, bias: ops.linear_int8(x, q, scales, bias)),
    "int4": (quantize_int4, lambda x, q, scales, bias: ops.linear_int4(x, q, scales, None, bias)),
}


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight. Its memory is not touched before `load`.

    q, scales: see the operators. shape, dtype: of the weight before it is rounded.
    """

    def __init__(self, layer: nn.Linear, kind: str):
        super().__init__()
        self.kind, self.dtype, self.bias = kind, layer.weight.dtype, layer.bias
        self.shape = n, k = layer.out_features, layer.in_features
        device = layer.weight.device
        if kind == "int8":
            made = torch.empty(n, k, dtype=torch.int8, device=device), torch.empty(n, device=device)
        else:
            made = torch.empty(n, k // 2, dtype=torch.uint8, device=device), torch.empty(n, k // BLOCK, device=device)
        self.q, self.scales = (nn.Parameter(x, requires_grad=False) for x in made)

    @property
    def weight(self) -> Tensor:
        """The shape and dtype of the weight, which some models look at."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def load(self, weight: Tensor) -> None:
        """Take the nearest quantized weight."""
        for own, new in zip((self.q, self.scales), self.rounded(weight), strict=True):
            own.copy_(new)

    def rounded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest quantized weight and its scales."""
        return KINDS[self.kind][0](weight.detach())[:2]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return KINDS[self.kind][1](rows, self.q, self.scales, self.bias).reshape(*x.shape[:-1], -1)


def quantized(model: nn.Module, kind: str, load: bool) -> nn.Module:
    """A copy of a causal language model with quantized linear layers. It shares all other tensors.

    load: whether the model's weights are rounded now. Raises ValueError for an unknown kind, for layers that the kind
    cannot hold and for a model without linear layers.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize={kind!r}; expected {' or '.join(map(repr, KINDS))}")
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, dict(shared))
    output = made.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    found = {path: x for path, x in made.named_modules() if type(x) is nn.Linear and x is not output}
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layers to quantize")
    for path, layer in found.items():
        if kind == "int4" and layer.in_features % BLOCK:
            raise ValueError(f"{path} has {layer.in_features} inputs; int4 needs a multiple of {BLOCK}: use int8")
        new = QuantizedLinear(layer, kind)
        if load:
            with torch.no_grad():
                new.load(layer.weight)
        parent, _, name = path.rpartition(".")
        setattr(made.get_submodule(parent), name, new)
    return made


def layers_of(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers of a model, by path."""
    return {path: x for path, x in model.named_modules() if isinstance(x, QuantizedLinear)}
