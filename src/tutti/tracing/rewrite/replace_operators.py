"""Operators that capture replaces: torch makes their shapes depend on values, lacks kernels, or draws numbers in them.

A table from an operator's name to a function of its arguments, called during tracing. It returns None to keep torch's
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tutti.tracing.rewrite.strided import in_order_of_memory

aten, ops = torch.ops.aten, torch.ops.tutti


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype=None) -> Tensor:
    """Replace grouped_mm, for which torch has kernels only for some dtypes and devices."""
    product = aten.bmm(a, b) if offs is None else ops.grouped_mm(a, b, offs, 0, offs.shape[0])
    product = product if bias is None else product + bias
    return product if out_dtype in (None, product.dtype) else product.to(out_dtype)


def _grouped_mm_backward(a: Tensor, b: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _grouped_mm(grad, b.mT, offs), _grouped_mm(a.mT, grad, offs)


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    lengths = [_lengths(x, log_probs.device) for x in (input_lengths, target_lengths)]
    return ops.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)


def _ctc_loss_backward(
    grad, log_probs, targets, input_lengths, target_lengths, loss, alpha, blank, zero_infinity=False
):
    lengths = [_lengths(x, log_probs.device) for x in (input_lengths, target_lengths)]
    return ops.ctc_loss_backward(grad, log_probs, targets, *lengths, loss, alpha, blank, zero_infinity)


def _lengths(lengths: Any, device: torch.device) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(list(lengths), dtype=torch.int64, device=device)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Counts of numbers below minlength. A larger number is an error when the step runs."""
    dtype = torch.int64 if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
    counted = torch.ones_like(x, dtype=dtype) if weights is None else weights.to(dtype)
    return torch.zeros(minlength, dtype=dtype, device=x.device).scatter_add(0, x.to(torch.int64), counted)


def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale the looked-up rows longer than `max_norm` to it, in place."""
    seen = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device).index_fill(0, indices.reshape(-1), 1)
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1)
    scale = torch.where((seen > 0) & (norms > max_norm), max_norm / (norms + 1e-7), torch.ones_like(norms))
    return weight.copy_(weight * scale[:, None])


def _rrelu(x: Tensor, noise: Tensor, lower=1 / 8, upper=1 / 3, training=False, generator=None):
    """Random slopes of negative numbers, drawn with `torch.rand_like`, which capture makes reproducible."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise
    slope = torch.where(x <= 0, torch.rand_like(x) * (upper - lower) + lower, 1.0)
    return x * slope, slope


def _attention_weights(q: Tensor, k: Tensor, blocked: Tensor | None) -> Tensor:
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    return (scores if blocked is None else scores.masked_fill(blocked, -torch.inf)).softmax(-1)


def _native_attention(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None,
    need_weights=True, average_attn_weights=True, mask_type=None,
):  # fmt: skip
    """The inference kernel of nn.MultiheadAttention. mask: True for keys to ignore; by mask_type of shape (queries,
    keys), (batch, keys) or (batch, heads, queries, keys)."""
    linear, parts = torch.nn.functional.linear, zip(qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (
        linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, (w, b) in zip((query, key, value), parts, strict=True)
    )
    blocked = None if mask is None else mask.bool()
    if blocked is not None and mask_type == 1:
        blocked = blocked[:, None, None, :]
    weights = _attention_weights(q, k, blocked) if need_weights else None
    if weights is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, None if blocked is None else ~blocked)
    else:
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    out = linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return out, query.new_empty(0) if weights is None else weights


def _encoder_layer(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps,
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, weight_1, bias_1, weight_2, bias_2, mask=None,
    mask_type=None,
):  # fmt: skip
    """The inference kernel of nn.TransformerEncoderLayer."""
    f = torch.nn.functional
    norms = [
        lambda x, w=w, b=b: f.layer_norm(x, (embed_dim,), w, b, eps)
        for w, b in ((norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2))
    ]
    weights = embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias

    def attend(x: Tensor) -> Tensor:
        return _native_attention(x, x, x, *weights, mask, False, True, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        inner = f.linear(x, weight_1, bias_1)
        return f.linear(f.gelu(inner) if use_gelu else f.relu(inner), weight_2, bias_2)

    if norm_first:
        src = src + attend(norms[0](src))
        return src + feed(norms[1](src))
    src = norms[0](src + attend(src))
    return norms[1](src + feed(src))


def _equal(x: Tensor, other: Tensor) -> bool:
    """`torch.equal` as a condition that Python evaluates."""
    return x.shape == other.shape and bool(torch.eq(x, other).all())


def _refuse_sparse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "the step creates a sparse tensor, but tensors of a step are dense: use nn.Embedding(..., sparse=False) (also "
        "for nn.EmbeddingBag); instead of torch.sparse_coo_tensor use torch.zeros(...).index_put(...), or x.to_dense() "
        "before the batch is made"
    )


SPARSE = [
    f"aten.{name}"
    for name in ("_sparse_coo_tensor_with_dims.default", "_sparse_coo_tensor_with_dims_and_tensors.default",
                 "sparse_coo_tensor.size", "_to_sparse.default", "_to_sparse.sparse_dim", "_to_sparse_csr.default",
                 "_to_sparse_csc.default", "_to_sparse_bsr.default", "_to_sparse_bsc.default",
                 "_sparse_compressed_tensor_unsafe.default", "sparse_compressed_tensor.comp_plain_value_size")
]  # fmt: skip

SIMPLER: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": _grouped_mm,
    "transformers.grouped_mm_fallback.default": _grouped_mm,
    "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
    "aten._ctc_loss.default": _ctc_loss,
    "aten._ctc_loss.Tensor": _ctc_loss,
    "aten._ctc_loss_backward.default": _ctc_loss_backward,
    "aten._ctc_loss_backward.Tensor": _ctc_loss_backward,
    "aten._native_multi_head_attention.default": _native_attention,
    "aten._transformer_encoder_layer_fwd.default": _encoder_layer,
    "aten.rrelu_with_noise_functional.default": _rrelu,
    "aten.equal.default": _equal,
    "aten.embedding_renorm_.default": _embedding_renorm,
    "aten._is_all_true.default": lambda x: x.all(),
    "aten._is_any_true.default": lambda x: x.any(),
    **dict.fromkeys(SPARSE, _refuse_sparse),
}

# A lazy conjugate or negation cannot be viewed as real numbers, or sent.
LAZY = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}


def simpler(operator: Any, args: Sequence) -> Callable[..., Any] | None:
    """The function to call instead of an operator with these arguments, or None."""
    if operator is aten.bincount.default:
        return _bincount if len(args) > 2 and args[2] else None
    if operator is aten._embedding_bag_backward.default and args[9]:
        return _refuse_sparse
    if operator is aten.as_strided.default:
        return in_order_of_memory(*args)
    if operator in LAZY:  # torch dispatches them for numbers too
        return LAZY[operator] if isinstance(args[0], Tensor) else None
    return SIMPLER.get(str(operator))
