"""An embedding with a quantized table, which is not trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutti.nn.quantized.quantized_linear import Quantized, QuantizedLinear, unpacked
from tutti.nn.quantized.scheme import Parts


class QuantizedEmbedding(Quantized):
    """Rows of a quantized table (n, k), in its dtype. An output layer may share the table.

    table: a quantized layer with the table as its weight. factor: that rows are multiplied by, as in Gemma.
    """

    q: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None

    def __init__(self, table: QuantizedLinear, factor: float | Tensor | None = None):
        super().__init__()
        self.scheme, self.dtype, self.layout = table.scheme, table.dtype, table.layout
        self.num_embeddings, self.embedding_dim = table.out_features, table.in_features
        self.factor = factor
        self.q, self.scales = table.q, table.scales
        self.register_parameter("zeros", table.zeros)

    @property
    def weight(self) -> Tensor:
        """The shape and dtype of the table."""
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self.dtype, device="meta")

    def table(self) -> QuantizedLinear:
        """The table as a layer, which shares it."""
        layer = QuantizedLinear(self.embedding_dim, self.num_embeddings, self.scheme, dtype=self.dtype, device="meta")
        layer.q, layer.scales = self.q, self.scales
        layer.register_parameter("zeros", self.zeros)
        return layer

    def parts(self) -> Parts:
        """The quantized table."""
        return self.table().parts()

    def forward(self, ids: Tensor) -> Tensor:
        at = ids.flatten()
        zeros = None if self.zeros is None else self.zeros[at]
        parts = unpacked(self.q[at], self.scales[at], zeros, self.scheme, self.embedding_dim)
        rows = self.scheme.dequantize(parts).to(self.dtype).unflatten(0, ids.shape)
        return rows if self.factor is None else rows * self.factor

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme}"


def factor_of(embedding: nn.Module) -> Any:
    """What an embedding of `transformers` multiplies its rows by. Raises ValueError for one that does more."""
    if type(embedding) is nn.Embedding:
        return None
    factor = getattr(embedding, "embed_scale", None)
    if not isinstance(embedding, nn.Embedding) or factor is None:
        raise ValueError(f"an embedding of kind {type(embedding).__name__} cannot be quantized: embeddings=None")
    return factor
