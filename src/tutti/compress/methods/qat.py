"""Quantization-aware training: layers that round their weight in each forward pass, and learn weights and scales.

Codes are c = clamp(round(w / s) + z, 0, 2^bits - 1), of ternary and binary weights the nearest of theirs, and the layer
multiplies by s (c - z). The gradient passes through the rounding as if it were not there (Bengio et al. 2013), which
gives scales the gradient of Learned Step Size Quantization (Esser et al. 2020, equation 3): round(w / s) - w / s inside
of the range, and c - z at its ends. For signs that is the gradient of BinaryNet (Courbariaux et al. 2016): it passes
where |w / s| <= 1. Ternary layers are those of BitNet b1.58 (Ma et al. 2024) but for the scales, which learn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.compress.experts import ExpertLayers
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding
from tutti.nn.quantized.quantized_linear import QuantizedLinear, quantized_layers
from tutti.nn.quantized.scheme import Parts, Scheme, nonzero

MARGIN = 0.45  # of a scale: how far from the middle of its code a weight may begin
BINARY_MARGIN = 0.95  # whose codes are two scales apart


class TrainedLinear(nn.Module):
    """A linear layer with a weight (n, k), and inputs, that are rounded as a scheme says.

    weight: before it is rounded, float32. It begins with what rounds to the codes of the layer, as near as may be to
    the weight that was rounded. pruned: whether weights that are 0 stay 0. factors: log of what the scales (n, groups)
    have been multiplied by. Zeros, and scales of inputs, are not trained.
    """

    scales: Tensor
    zeros: Tensor | None
    input_scale: Tensor | None
    mask: Tensor | None

    def __init__(self, layer: QuantizedLinear, weight: Tensor, pruned: bool = False):
        super().__init__()
        self.scheme, self.dtype, self.bias = layer.scheme, layer.dtype, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        parts = layer.parts()
        margin = BINARY_MARGIN if self.scheme.kind == "binary" else MARGIN
        near, reach = self.scheme.dequantize(parts), margin * parts.scales.abs()
        reach = reach.repeat_interleave(self.in_features // reach.shape[1], 1)
        away = (weight.detach().float() - near).clamp(-reach, reach)
        self.weight = nn.Parameter(near + away)  # rounds to the codes that were found
        self.factors = nn.Parameter(torch.zeros_like(parts.scales))
        self.register_buffer("mask", weight != 0 if pruned else None)
        self.register_buffer("input_scale", None if layer.input_scale is None else layer.input_scale.detach().clone())
        self.register_buffer("scales", parts.scales.clone())
        self.register_buffer("zeros", None if parts.zeros is None else parts.zeros.clone())

    def rounded(self) -> Tensor:
        """The rounded weight (n, k), of the dtype of the layer."""
        return rounded(self.masked(), self.scales * self.factors.exp(), self.zeros, self.scheme).to(self.dtype)

    def masked(self) -> Tensor:
        """The weight (n, k) before it is rounded."""
        return self.weight if self.mask is None else self.weight * self.mask

    def forward(self, x: Tensor) -> Tensor:
        if self.scheme.activations:
            x = rounded_inputs(x, self.input_scale)
        return F.linear(x, self.rounded().to(x.dtype), self.bias)

    @torch.no_grad()
    def quantized(self) -> QuantizedLinear:
        """The layer that this one has learned."""
        scales = self.scheme.stored(self.scales * self.factors.exp(), self.dtype)
        parts = Parts(self.scheme.codes(self.masked(), scales, self.zeros), scales, self.zeros)
        bias = None if self.bias is None else nn.Parameter(self.bias.detach(), requires_grad=False)
        return QuantizedLinear.from_parts(parts, self.scheme, bias, self.dtype, self.input_scale)


class PrunedLinear(nn.Module):
    """A linear layer whose weights that are 0 stay 0."""

    mask: Tensor

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer
        self.register_buffer("mask", layer.weight.detach() != 0)

    @property
    def weight(self) -> Tensor:
        """With zeros."""
        return self.layer.weight * self.mask

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.layer.bias)


class TrainedEmbedding(nn.Module):
    """Rows of the rounded weight of a layer, which may be the output layer."""

    def __init__(self, table: TrainedLinear, factor: float | Tensor | None):
        super().__init__()
        self.table, self.factor = table, factor

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.table.rounded())
        return rows if self.factor is None else rows * self.factor


def rounded(weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """The nearest weight (n, k) of a scheme in float32, through which gradients pass. scales: (n, groups)."""
    zero = 2 ** (scheme.bits - 1) if zeros is None else zeros.float().unsqueeze(2)
    steps = nonzero(scales).unsqueeze(2)
    codes = (weight.unflatten(1, (scales.shape[1], -1)) / steps + zero).clamp(scheme.least, scheme.most)
    codes = codes + (scheme.nearest(codes) - codes).detach()
    return (scales.unsqueeze(2) * (codes - zero)).flatten(1)


def rounded_inputs(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Inputs (..., k) as multiples of a scale by -128 to 127, through which gradients pass where they are in range.

    scale: a number, the scale of all rows; None: each row has its own, its largest magnitude over 127.
    """
    if scale is None:
        scale = (x.detach().abs().amax(-1, keepdim=True).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
        codes = x.float() / scale
    else:
        codes = (x.float() / scale).clamp(-128, 127)
    return ((codes + (codes.round() - codes).detach()) * scale).to(x.dtype)


def trainable(model: nn.Module, weights: Mapping[str, Tensor], pruned: Collection[str] = ()) -> None:
    """Replace the quantized layers of a model by ones that learn.

    weights: before they were rounded, by path; others begin with the rounded ones. pruned: paths of layers whose zeros
    stay. Raises ValueError for float8.
    """
    for path in pruned:
        if type(layer := model.get_submodule(path)) is nn.Linear:
            model.set_submodule(path, PrunedLinear(layer))
    for x in model.modules():
        if isinstance(x, ExpertLayers):
            x.dense = True
    tables: dict[Tensor, TrainedLinear] = {}  # by the codes, which tied layers share
    for path, layer in quantized_layers(model).items():
        if layer.scheme.kind == "float8":
            raise ValueError(f"{path} is in float8, which is not trained: distill before it is quantized")
        tables[layer.q] = TrainedLinear(layer, weights.get(path, layer.dequantize()), path in pruned)
        model.set_submodule(path, tables[layer.q])
    for path, x in _embeddings(model):
        table = tables.get(x.q) or TrainedLinear(x.table(), weights.get(path, x.table().dequantize()))
        model.set_submodule(path, TrainedEmbedding(table, x.factor))


@torch.no_grad()
def finished(model: nn.Module) -> dict[str, Tensor]:
    """Replace layers that have learned by quantized ones. Returns their weights before they were rounded, by path."""
    weights: dict[str, Tensor] = {}
    tables: dict[nn.Module, QuantizedLinear] = {}
    learned = [(path, x) for path, x in model.named_modules(remove_duplicate=False)]
    for path, x in learned:
        if isinstance(x, TrainedEmbedding):
            tables[x.table], weights[path] = x.table.quantized(), x.table.masked()
            model.set_submodule(path, QuantizedEmbedding(tables[x.table], x.factor))
    for path, x in learned:
        if isinstance(x, TrainedLinear) and not any(path == f"{p}.table" for p, y in learned if y is not x):
            model.set_submodule(path, tables.get(x) or x.quantized())
            weights[path] = x.masked()
        elif isinstance(x, ExpertLayers):
            x.dense = False
        elif isinstance(x, PrunedLinear):
            x.layer.weight.mul_(x.mask)
            model.set_submodule(path, x.layer)
    return weights


def _embeddings(model: nn.Module) -> Iterable[tuple[str, QuantizedEmbedding]]:
    return [(path, x) for path, x in model.named_modules() if isinstance(x, QuantizedEmbedding)]
