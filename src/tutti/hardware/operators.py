"""Which of a device's figures price an ATen operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import tutti.nn.experts.grouped  # noqa: F401  (registers the operator)
from tutti.hardware.device import Device, Dtype

aten = torch.ops.aten
Shape = tuple[int, ...]


def _grouped(a: Shape, b: Shape, ends: Shape) -> tuple[int, int, int, int]:
    """Groups of equal size."""
    if len(a) == len(b) == 2:
        return ends[0], a[0], -(-a[1] // ends[0]), b[1]
    return (b[0], -(-a[0] // b[0]), a[1], b[2]) if len(a) == 2 else (a[0], a[1], a[2], -(-b[1] // a[0]))


GROUPED = torch.ops.tutti.grouped_mm.default

# Matrix products: (batch, m, k, n) of the shapes of their tensor operands.
PRODUCTS: dict[Any, Callable[..., tuple[int, int, int, int]]] = {
    aten.mm.default: lambda a, b: (1, *a, b[1]),
    aten.addmm.default: lambda _, a, b: (1, *a, b[1]),
    aten.bmm.default: lambda a, b: (*a, b[2]),
    aten.baddbmm.default: lambda _, a, b: (*a, b[2]),
    GROUPED: _grouped,
}

CONVOLUTION = "convolution"

# Other matrix work, by its key in a device's `efficiency`.
KINDS = {
    "attention": ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                  "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
                  "tutti::attention", "tutti::striped_attention"),
    CONVOLUTION: (CONVOLUTION,),
}  # fmt: skip

# All others are memory-bound: names of operators by family, backward passes included. "add" by default.
FAMILY = {
    "update": ("tutti::adam", "tutti::adam_amsgrad"),
    "sum": ("sum", "mean", "amax", "amin", "any", "all", "prod", "argmax", "argmin"),
    "compare": ("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not", "isnan", "isinf"),
    "where": ("where", "masked_fill", "_safe_softmax"),  # the last checks for fully masked rows
    "exp": ("exp", "exp2", "expm1", "log", "log2", "log1p", "pow", "sigmoid", "softplus", "logsumexp", "cumsum"),
    "tanh": ("tanh", "sin", "cos", "atan"),
    "erf": ("erf", "erfc", "erfinv"),
    "gelu": ("gelu",),
    "silu": ("silu", "mish", "elu", "tutti::glu", "tutti::glu_backward"),
    "softmax": ("_softmax", "_log_softmax"),
    "norm": ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
             "_fused_rms_norm", "tutti::rms_norm", "tutti::rms_norm_backward"),
    "index": ("embedding", "index", "index_select", "gather", "take"),
    "scatter": ("index_put", "index_add", "scatter", "scatter_add", "scatter_reduce"),
    "table": ("embedding_dense", "_embedding_bag_backward"),
    "transpose": ("clone", "pixel_shuffle", "pixel_unshuffle", "tutti::rotary", "tutti::rotary_backward"),
    "pool": ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
}  # fmt: skip

# Views that transpose an operand.
TRANSPOSING = (aten.t.default, aten.transpose.int, aten.permute.default)

_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
_FAMILY_OF = {name: family for family, names in FAMILY.items() for name in names}


def seconds(
    device: Device,
    target: Any,
    shapes: Sequence[Shape],
    dtype: Dtype,
    flops: float,
    moved: float,
    transposed: bool = False,
    family: str = "",
) -> float:
    """Seconds of one operator, without its overhead.

    target: the operator. shapes: shapes of its tensor operands, used for matrix products and attention only. dtype:
    dtype of its result; if the device has no figures for it, those of float32 are used. flops: FLOPs of matrix work.
    moved: bytes read and written. transposed: whether the first matrix of a product is a transposed view
    (`lies_transposed`). family: overrides the family found by the operator's name.
    """
    if target in PRODUCTS:
        kind = "grouped" if target is GROUPED else ""
        return device.matmul_seconds(*PRODUCTS[target](*shapes), device.dtype_with_peak(dtype), transposed, kind)
    name = _name(target)
    if name in _KIND_OF:
        kind = _KIND_OF[name] + ("_backward" if "_backward" in str(target) else "")
        if name == CONVOLUTION or not shapes:
            rate = device.rate(device.dtype_with_peak(dtype), kind)
        else:
            width = max(s[-1] for s in shapes[:3])
            rate = device.attention_rate(device.dtype_with_peak(dtype), kind, shapes[1][-2], width)
        return max(flops / rate, moved / device.reached)
    streamed = device.stream_seconds(moved, family or family_of(target), dtype)
    return max(flops / device.rate(device.dtype_with_peak(dtype)), streamed)


def is_attention(target: Any) -> bool:
    """Whether an operator is fused attention or its backward pass."""
    return _KIND_OF.get(_name(target)) == "attention"


def lies_transposed(node: fx.Node) -> bool:
    """Whether the first matrix of a product is a transposed view, as in the gradient of a weight."""
    if node.target not in PRODUCTS:
        return False
    first = node.args[-2]  # after the bias of addmm and baddbmm
    return isinstance(first, fx.Node) and first.target in TRANSPOSING


def keeps_rows(node: fx.Node) -> bool:
    """Whether the last dim of a call's result is contiguous, as far as transposing views determine it."""
    if node.target not in TRANSPOSING:
        return True
    rank = len(node.meta["val"].shape)
    if node.target is aten.permute.default:
        return node.args[1][-1] % rank == rank - 1  # pyright: ignore
    return node.target is aten.transpose.int and all(d % rank != rank - 1 for d in node.args[1:])  # pyright: ignore


def family_of(target: Any) -> str:
    """The family whose seconds per byte price an operator."""
    return _FAMILY_OF.get(_full_name(target)) or _FAMILY_OF.get(_name(target), "add")


def _full_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema else ""


def _name(target: Any) -> str:
    """The base name of an ATen operator: "silu" for aten.silu_backward.default."""
    return _full_name(target).removesuffix("_data").removesuffix("_backward").rstrip("_")
