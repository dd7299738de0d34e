"""A linear layer for few rows: x (m, k), weight (n, k) as `torch.nn.Linear` stores it, bias (n) or none -> (m, n).

`tutti::linear_rows` equals `torch.nn.functional.linear`. On a CPU, float32 and bfloat16 are computed by
`linear_rows.cpp`, which is compiled at first use. It reads the weight once, and a row of the result has the same bits
whatever the other rows are, and for any number of threads: PyTorch's kernels differ for one row and for several.
bfloat16 is accumulated in float32, by AMX or bfloat16 instructions where the processor has them. On a GPU, the kernel
is that of `tutti.nn.linear.linears_rows`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tutti import compat
from tutti.nn import rows
from tutti.nn.compiled import operators
from tutti.nn.linear import linears_rows
from tutti.nn.linear.weight_kinds import SAME

aten, ops = torch.ops.aten, torch.ops.tutti
SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = torch.float32, torch.bfloat16  # dtypes of x of the compiled kernels
FASTER = 64  # rows up to which it is faster than PyTorch's

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("linear_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@cache
def kernels() -> Any:
    """The compiled operators: see the end of `linear_rows.cpp`."""
    return operators(SOURCE)


@cache
def rounds() -> bool:
    """Whether rows of x can be rounded to int8 (AVX-512 VNNI)."""
    return kernels().rounds()


def digits(x: Any, rounded: bool) -> int:
    """Digits of int8 that rows of x are rounded to before they are multiplied by a quantized weight; 0: they are not.

    Two digits are 16 bits: more than bfloat16 has.
    """
    if rounded:
        return 1
    return 2 if x.dtype == torch.bfloat16 and rounds() else 0


def quantized_on_gpu(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, kind: int, bits: int,
    dequantized: Callable[[], Tensor],
) -> Tensor:  # fmt: skip
    """x W^T + bias for a quantized weight of some kind on a GPU: by Triton for few rows, else of its dequantized
    weight in the dtype of x."""
    most = 16 if x.dtype == torch.float32 else linears_rows.ROWS  # tiles of float32 fill the shared memory
    if 0 < len(x) <= most and rows.triton_kernels(x, bias):
        from tutti.nn.linear import linear_quantized_triton

        return linear_quantized_triton.linear(x, weight, scales, zeros, bias, kind, bits)
    return F.linear(x, dequantized().to(x.dtype), bias)


@cache
def tiles() -> bool:
    """Whether the processor multiplies tiles (AMX)."""
    return compat.multiplies_tiles()


def compiled(x: Any, weight: Any, bias: Any) -> tuple | None:
    """The compiled operator and its arguments for tensors, or Specs, of these shapes and dtypes; None if they do not
    fit."""
    alike = x.dtype == weight.dtype and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
    fits = alike and x.dtype in DTYPES and len(x.shape) == len(weight.shape) == 2 and x.shape[1] == weight.shape[1]
    if not fits:
        return None
    return kernels().linear_rows.default, (x, weight, None, None, bias, SAME, 0, 0, tiles())


def cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operator on a CPU."""
    if call := compiled(x, weight, bias):
        op, args = call
        return op(*args)
    return F.linear(x, weight, bias)  # which raises for operands that do not fit


_library.impl("linear_rows", cpu, "CPU")


def _on_gpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linears_rows.linears_on_gpu(x, [weight], [bias])[0]


_library.impl("linear_rows", _on_gpu, "CUDA")
torch.library.register_fake("tutti::linear_rows", lambda x, weight, bias: F.linear(x, weight, bias))


def use(graph: fx.Graph, rows: float = FASTER, on_cpu: bool = True) -> None:
    """Use this kernel for the products of a graph with at most so many rows and the transpose of a stored weight, in
    place. On a CPU, starts its compilation. rows: infinity for bits that do not depend on the number of rows."""
    replaced = [(node, operands) for node in graph.nodes if (operands := _operands(node)) and _fits(operands[0], rows)]
    if replaced and on_cpu:
        compile_ahead()
    for node, operands in replaced:
        rest = [x for x in node.all_input_nodes if x not in operands]  # transposed weights
        node.target, node.args, node.kwargs = ops.linear_rows.default, operands, {}
        for turned in rest:
            if not turned.users:
                graph.erase_node(turned)


def compile_ahead() -> None:
    """Start the compilation of the kernels."""
    threading.Thread(target=_compile, name="tutti compiler", daemon=True).start()


def _compile() -> None:
    with suppress(Exception):  # raised again where it is called
        kernels()


def _fits(x: fx.Node, rows: float) -> bool:
    spec = x.meta["val"]
    return spec.dtype in DTYPES and len(spec.shape) == 2 and spec.shape[0] <= rows


def _operands(node: Any) -> tuple | None:
    """(x, weight, bias) of a product with a transposed input of the graph, or None."""
    if node.target is aten.mm.default:
        (x, right), bias = node.args, None
    elif node.target is aten.addmm.default and len(node.args) == 3 and not node.kwargs:
        bias, x, right = node.args
        if len(bias.meta["val"].shape) != 1 or bias.meta["val"].shape[0] != right.meta["val"].shape[1]:
            return None
    elif node.target is aten.linear.default:
        return (*node.args, None)[:3] if _is_stored(node.args[1]) else None
    else:
        return None
    turned = right.target in (aten.t.default, aten.transpose.int, aten.permute.default)
    return (x, right.args[0], bias) if turned and _is_stored(right.args[0]) else None


def is_layer(node: fx.Node) -> bool:
    """Whether a node is a product that `use` replaces for some number of rows."""
    operands = _operands(node)
    return operands is not None and _fits(operands[0], inf)


def _is_stored(weight: fx.Node) -> bool:
    return weight.op == "placeholder" and len(weight.meta["val"].shape) == 2
