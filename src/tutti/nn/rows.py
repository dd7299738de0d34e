"""Norms, rotary embedding, activations and gated units without gradients.

On a CPU they are compiled from `rows.cpp`; on a GPU they are Triton kernels.

| operator | is |
|---|---|
| norm_rows(x, weight, bias, eps, offset, wide, centered) | `tutti.nn.rms_norm`, or a layer norm, where `centered` |
| rotary_rows(x, cos, sin) | `tutti.nn.rotary`; x (a, b, c, width), and the result has its strides |
| activation_rows(x, activation) | a function of `tutti.nn.activation` |
| glu_rows(gate, up, activation) | `tutti.nn.glu` |

They round where the formulas round, and differ from them in the order of sums; in bfloat16, exponentials and gelu are
polynomials whose errors are below the rounding. The bits of a row do not depend on the other rows. For a row of a
decoding step they take a tenth of the time of the formulas, operator by operator. A GPU computes activations, and
without Triton all of them, as formulas.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tutti.nn import glu, rms_norm, rotary
from tutti.nn.activation import ACTIVATIONS
from tutti.nn.compiled import has_triton, operators

aten, ops = torch.ops.aten, torch.ops.tutti
SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = torch.float32, torch.bfloat16  # dtypes of the compiled kernels
ACTIVATION_OF = {
    aten.gelu.default: "gelu", aten.gelu.out: "gelu", aten.silu.default: "silu", aten.silu.out: "silu",
    aten.relu.default: "relu",
}  # fmt: skip
GATES = ACTIVATIONS.keys() - {"relu2"}

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "norm_rows(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset, bool wide, bool centered) -> Tensor"
)
_library.define("rotary_rows(Tensor x, Tensor cos, Tensor sin) -> Tensor")
_library.define("activation_rows(Tensor x, str activation) -> Tensor")
_library.define("glu_rows(Tensor gate, Tensor up, str activation) -> Tensor")


@cache
def kernels() -> Any:
    """The compiled operators: see the end of `rows.cpp`."""
    return operators(SOURCE)


def compiled(name: str, *args: Any) -> tuple | None:
    """The compiled operator of a name and its arguments: tensors, or Specs, and options. None if it does not fit."""
    kinds = {x.dtype for x in args if hasattr(x, "dtype")}
    gated = name in ("glu_rows", "activation_rows")
    fits = len(kinds) == 1 and kinds <= set(DTYPES) and (not gated or args[-1] in GATES)
    return (getattr(kernels(), name).default, args) if fits else None


def _on_cpu(name: str, reference: Callable) -> Callable:
    """An operator on a CPU."""

    def cpu(*args):
        if call := compiled(name, *args):
            op, args = call
            return op(*args)
        return reference(*args)

    return cpu


def greatest(x: Tensor) -> Tensor:
    """The first index of the greatest number of each row: x (rows, width) -> (rows) int64.

    -1 where no number is above -infinity, or one is not a number.
    """
    if x.is_cpu and x.dtype in DTYPES:
        return kernels().greatest_rows(x)
    most, index = x.max(1)
    return torch.where(most > -torch.inf, index, -1)


def triton_kernels(*tensors: Any) -> Any:
    """The module of Triton kernels, if it is usable for these tensors (or None), else None."""
    kinds = {x.dtype for x in tensors if x is not None}
    if len(kinds) > 1 or not kinds <= set(DTYPES) or not has_triton():
        return None
    from tutti.nn import rows_triton

    return rows_triton


def norm_reference(x, weight, bias, eps, offset, wide, centered):
    if centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()
    y = rms_norm.forward(x, weight, eps, offset, wide)[0].contiguous()
    return y if bias is None else y + bias


def rotary_reference(x, cos, sin):
    return torch.empty_like(x).copy_(rotary.forward(x, cos, sin))


def activation_reference(x, activation):
    return ACTIVATIONS[activation].forward(x).contiguous()


def glu_reference(gate, up, activation):
    return glu.forward(gate, up, activation).contiguous()


def norm_on_gpu(x, weight, bias, *options):
    kernels = triton_kernels(x, weight, bias)
    return kernels.norm(x, None, weight, bias, *options) if kernels else norm_reference(x, weight, bias, *options)


def rotary_on_gpu(x, cos, sin):
    kernels = triton_kernels(x, cos, sin)
    return kernels.rotary(x, cos, sin) if kernels else rotary_reference(x, cos, sin)


def glu_on_gpu(gate, up, activation):
    kernels = triton_kernels(gate, up) if activation in GATES else None
    return kernels.glu(gate, up, activation) if kernels else glu_reference(gate, up, activation)


GPU = {"norm_rows": norm_on_gpu, "rotary_rows": rotary_on_gpu, "glu_rows": glu_on_gpu}
REFERENCES = {"norm_rows": norm_reference, "rotary_rows": rotary_reference, "glu_rows": glu_reference,
              "activation_rows": activation_reference}  # fmt: skip
CPU = {name: _on_cpu(name, reference) for name, reference in REFERENCES.items()}
for _name, _reference in REFERENCES.items():
    _library.impl(_name, CPU[_name], "CPU")
    _library.impl(_name, GPU.get(_name, _reference), "CUDA")
torch.library.register_fake("tutti::norm_rows", lambda x, *rest: x.new_empty(x.shape))
torch.library.register_fake("tutti::rotary_rows", lambda x, cos, sin: torch.empty_like(x))
torch.library.register_fake("tutti::activation_rows", lambda x, activation: x.new_empty(x.shape))
torch.library.register_fake("tutti::glu_rows", lambda gate, up, activation: gate.new_empty(gate.shape))


def use(graph: fx.Graph, on_cpu: bool = True) -> None:
    """Use these kernels for a graph without gradients, in place. On a CPU, starts their compilation."""
    replaced = [node for node in graph.nodes if node.op == "call_function" and _replaced(graph, node, on_cpu)]
    if replaced and on_cpu:
        threading.Thread(target=_compile, name="tutti compiler", daemon=True).start()


def _replaced(graph: fx.Graph, node: Any, on_cpu: bool) -> bool:
    """Replace a call if there is a kernel for it."""
    if on_cpu and node.target in ACTIVATION_OF:
        return _replaced_activation(node)
    if node.target in (ops.rotary.default, ops.glu.default):
        fits = node.meta["val"].dtype in DTYPES
        if fits and node.target is ops.glu.default:
            node.target = ops.glu_rows.default
        elif fits and len(node.meta["val"].shape) == 4:
            node.target = ops.rotary_rows.default
        else:
            return False
        return True
    if node.target is ops.rms_norm.default:
        (x, weight, *options), bias, centered = node.args, None, False
    elif node.target is aten.native_layer_norm.default and len(node.args[1]) == 1:
        x, _, weight, bias, eps = node.args
        options, centered = (eps, 0.0, True), True
    else:
        return False
    kinds = {t.meta["val"].dtype for t in (x, weight, bias) if t is not None}
    parts = list(node.users)
    if len(kinds) > 1 or not kinds <= set(DTYPES) or any(p.target is not operator.getitem or p.args[1] for p in parts):
        return False
    with graph.inserting_before(node):
        new = graph.call_function(ops.norm_rows.default, (x, weight, bias, *options, centered))
    new.meta = dict(parts[0].meta)
    for part in parts:
        part.replace_all_uses_with(new)
        graph.erase_node(part)
    graph.erase_node(node)
    return True


def _replaced_activation(node: Any) -> bool:
    """Replace an activation, also one that overwrites its operand, unless that is an input."""
    x, result = node.args[0], node.meta["val"]
    out = node.kwargs.get("out")
    if result.dtype not in DTYPES or not result.shape or (out and (out is not x or out.op == "placeholder")):
        return False
    name = ACTIVATION_OF[node.target]
    if node.kwargs.get("approximate") == "tanh":
        name = "gelu_tanh"
    node.target, node.args, node.kwargs = ops.activation_rows.default, (x, name), {}
    return True


def _compile() -> None:
    with suppress(Exception):  # raised again where they are called
        kernels()
