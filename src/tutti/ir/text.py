"""Graphs as text: one line for each node, with its arguments, result and label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from tutti.ir.spec import Spec


def described(value: Any) -> str:
    """A result: `float32[8, 16]`; several in parentheses."""
    if isinstance(value, Spec):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"({', '.join(map(described, value))})" if isinstance(value, tuple) else ""


def lines(nodes: Iterable[fx.Node], notes: Mapping[fx.Node, str]) -> list[str]:
    """A line for each call, in three columns: the call, its result, and a note (by default the node's label)."""
    rows = [
        (
            f"%{node.name} = {_target(node.target)}({_arguments(node)})",
            described(node.meta.get("val")),
            notes.get(node) or node.meta.get("label", ""),
        )
        for node in nodes
        if node.op == "call_function"
    ]
    return columns(rows)


def columns(rows: Iterable[tuple[str, ...]], max_width: int = 72) -> list[str]:
    """Format rows with aligned columns. Wider columns than `max_width` are not padded."""
    rows = list(rows)
    widths = [min(max_width, max(map(len, column))) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{text:{w}}" for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _target(target: Any) -> str:
    return (
        str(target).removesuffix(".default") if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    )


def _arguments(node: fx.Node) -> str:
    return ", ".join([*map(_argument, node.args), *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())])


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_argument, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)
