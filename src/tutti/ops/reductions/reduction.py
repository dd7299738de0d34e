"""Reductions: a split reduced dim leaves a partial result, or the local computation combines the ranks' results."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase

import torch
from torch import Tensor

from tutti.ir.op_info import LOCAL, SENDS, UNEVEN
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, named, rules

aten = torch.ops.aten


def reduced_dims(dim: int | list[int] | None, rank: int) -> list[int]:
    """The reduced dims: all if none is named."""
    dims = range(rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return sorted({d % rank for d in dims}) if rank else []


def reduction(operation: str = "sum", linear: bool = False, mark: str = "", outputs: int = 1):
    """The rule of an operator (x, ..., dim, keepdim). With a mark its results are already combined."""

    def notation(node: Call) -> str:
        rank = len(node.args[0].meta["val"].shape)
        arguments = named(node.target, node.args, node.kwargs)
        dims = reduced_dims(arguments.get("dim"), rank)
        how = mark or f":{operation}"
        left = [f"{c}{how}" if i in dims else c for i, c in enumerate(ascii_lowercase[:rank])]
        keep = arguments.get("keepdim")
        right = " ".join("1" if i in dims else c for i, c in enumerate(ascii_lowercase[:rank]) if keep or i not in dims)
        out = f"={right}" if mark else right
        return f"{' '.join(left)} -> {', '.join([out] * outputs)}" + (" | ~0" if linear else "")

    return notation


def over_ranks(here, x: Tensor, dims: list[int], op: str) -> Tensor:
    """Reduce over all parts of these dims of the operand."""
    for dim in dims:
        x = here.all_reduce(x, ascii_lowercase[dim], op)
    return x


def wide(x: Tensor) -> Tensor:
    """float16 and bfloat16 are accumulated in float32, as torch does."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide_bytes(spec: Spec) -> int:
    """Bytes of `wide` of a tensor."""
    return spec.numel * max(4, spec.dtype.itemsize)


TRUTH = {aten.any: "max", aten.all: "min"}
TRUTHS = {target: op for packet, op in TRUTH.items() for target in (packet.default, packet.dim, packet.dims)}
PRODUCTS = (aten.prod.default, aten.prod.dim_int)

rules(
    {
        aten.sum.default: reduction("sum", linear=True),
        aten.sum.dim_IntList: reduction("sum", linear=True),
        aten.nansum.default: reduction("sum"),
        aten.mean.default: reduction("avg", linear=True),
        aten.mean.dim: reduction("avg", linear=True),
        aten.amax.default: reduction("max"),
        aten.amin.default: reduction("min"),
        aten.max.default: reduction("max"),
        aten.min.default: reduction("min"),
        aten.count_nonzero.default: reduction("sum"),
        aten.count_nonzero.dim_IntList: reduction("sum"),
        aten.aminmax.default: reduction(mark="@", outputs=2),
    }
    | dict.fromkeys([*TRUTHS, *PRODUCTS], reduction(mark="@"))
)


def _truth(target, op: str) -> Callable:
    def local(here, x, *args, **kwargs):
        own = target(x, *args, **kwargs)
        dims = reduced_dims(named(target, (x, *args), kwargs).get("dim"), x.ndim)
        return over_ranks(here, own.to(torch.uint8), dims, op).to(own.dtype)

    return local


def _product(target) -> Callable:
    def local(here, x, *args, **kwargs):
        own = target(x, *args, **kwargs)
        for dim in reduced_dims(named(target, (x, *args), kwargs).get("dim"), x.ndim):
            if here.axes(ascii_lowercase[dim]):
                own = aten.prod.dim_int(here.all_gather(own, ascii_lowercase[dim]), 0, dtype=own.dtype)
        return own

    return local


def _extremes(here, x, *, dim=None, keepdim=False):
    low, high = aten.aminmax(x, dim=dim, keepdim=keepdim)
    dims = reduced_dims(dim, x.ndim)
    return over_ranks(here, low, dims, "min"), over_ranks(here, high, dims, "max")


LOCAL |= {target: _truth(target, op) for target, op in TRUTHS.items()}
LOCAL |= {target: _product(target) for target in PRODUCTS}
LOCAL[aten.aminmax.default] = _extremes


def sends(kind: str):
    """A collective of each result."""

    def sent(cut: Cut) -> list[tuple[str, int]]:
        return [(kind, out.bytes) for out in cut.outputs]

    return sent


def _truth_sends(cut: Cut) -> list[tuple[str, int]]:
    return [("all_reduce", cut.outputs[0].numel)]  # a byte each


SENDS |= dict.fromkeys(TRUTHS, _truth_sends) | dict.fromkeys(PRODUCTS, sends("all_gather"))
SENDS[aten.aminmax.default] = sends("all_reduce")

UNEVEN |= dict.fromkeys((*TRUTHS, *PRODUCTS, aten.aminmax.default), True)
