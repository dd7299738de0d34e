"""Functional graphs as JSON, so that another process compiles what this one will run."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import torch
from torch import fx

KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
MODULES = ("_operator", "operator", "math")  # of functions other than operators of torch


class NotPortable(ValueError):
    """A graph has a node or an argument that JSON cannot express."""


def packed(graph: fx.Graph) -> list[list[Any]]:
    """The nodes of a graph: kind, name, target, arguments. Raises NotPortable."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    return [[node.op, node.name, _target(node), _value(node.args, number), _value(node.kwargs, number)]
            for node in graph.nodes]  # fmt: skip


def unpacked(rows: list[list[Any]]) -> fx.Graph:
    """The inverse of `packed`. Raises NotPortable for rows that name anything else than operators of torch."""
    graph, nodes = fx.Graph(), []
    for op, name, target, args, kwargs in rows:
        function = _function(target) if op == "call_function" else target
        nodes.append(graph.create_node(op, function, _read(args, nodes), _read(kwargs, nodes), name))
    return graph


def _target(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return f"op {node.target.namespace}.{node.target.overloadpacket.__name__}.{node.target._overloadname}"
    module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__qualname__", "")
    if node.op != "call_function" or module not in MODULES:
        raise NotPortable(f"{node.op} of {node.target}")
    return f"function {module}.{name}"


def _function(target: str) -> Any:
    kind, _, path = target.partition(" ")
    if kind == "op":
        namespace, name, overload = path.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    module, _, name = path.rpartition(".")
    if kind != "function" or module not in MODULES:
        raise NotPortable(target)
    return operator.attrgetter(name)(importlib.import_module(module))


def _value(x: Any, number: dict[fx.Node, int]) -> Any:
    """An argument: numbers and strings as they are, everything else as [kind, ...]."""
    if isinstance(x, fx.Node):
        return ["node", number[x]]
    if isinstance(x, float | complex):
        return ["number", repr(x)]
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, tuple | list):  # the lists of fx are of a class of their own
        return ["tuple" if isinstance(x, tuple) else "list", *(_value(y, number) for y in x)]
    if isinstance(x, dict):
        return ["dict", *([key, _value(y, number)] for key, y in x.items())]
    if isinstance(x, slice):
        return ["slice", *(_value(y, number) for y in (x.start, x.stop, x.step))]
    if isinstance(x, torch.device):
        return ["device", str(x)]
    for kind, cls in KINDS.items():
        if isinstance(x, cls):
            return [kind, str(x).removeprefix("torch.")]
    raise NotPortable(f"an argument of type {type(x).__name__}")


def _read(x: Any, nodes: list[fx.Node]) -> Any:
    if not isinstance(x, list):
        return x
    kind, *rest = x
    if kind == "node":
        return nodes[rest[0]]
    if kind == "number":
        return complex(rest[0]) if "j" in rest[0] else float(rest[0])
    if kind == "dict":
        return {key: _read(y, nodes) for key, y in rest}
    if kind == "device":
        return torch.device(rest[0])
    if kind in KINDS:
        return getattr(torch, rest[0])
    values = [_read(y, nodes) for y in rest]
    return slice(*values) if kind == "slice" else tuple(values) if kind == "tuple" else values
