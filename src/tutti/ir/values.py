"""Values that a model's Python code reads during capture, and that depend only on the batch.

`if attention_mask.all()`, `grid.tolist()`, `labels.max() >= n` and `x[mask]` need values, which fake tensors lack. If
they depend only on the batch and constants, capture computes them from the example batch. The captured graph is then
valid for batches with the same values. `Guards` recomputes them for another batch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from tutti import compat

MOST_SHOWN = 60  # characters of a value in a message


class TracedCall(NamedTuple):
    """A call as it was traced, because its node is rewritten later."""

    node: fx.Node
    target: Any
    args: tuple
    kwargs: dict


@dataclass(frozen=True)
class Asked:
    """A value that Python read: the operator, its operands (nodes for tensors), result, and source line."""

    target: Any
    args: tuple
    kwargs: dict
    value: Any
    line: str


class Values:
    """Real values of nodes during tracing, computed on demand from those of placeholders."""

    def __init__(
        self, graph: fx.Graph, input_values: Mapping[fx.Node, torch.Tensor], constants: Mapping[str, torch.Tensor]
    ):
        self.graph, self.input_values, self.constants = graph, input_values, constants
        self.real: dict[fx.Node, Any] = {}
        self.computed: list[fx.Node] = []  # in order
        self.last: fx.Node | None = None  # last visited
        self.asked: list[Asked] = []

    def ask(self, target: Any, args: tuple, kwargs: dict, line: str) -> Any:
        """Return the result of an operator on nodes, and record that it was read. None if it depends on more than the
        batch."""
        self._advance()
        if any(node not in self.real for node in _nodes(args, kwargs)):
            return None
        with compat.computing_really():
            result = _call(target, args, kwargs, self.real)
        self.asked.append(Asked(target, args, kwargs, result, line))
        return result

    def _advance(self) -> None:
        """Compute the nodes traced since the last call that depend only on the batch."""
        if self.last is None:
            with compat.computing_really():
                self.real |= {node: x.detach().clone() for node, x in self.input_values.items()}
        node = self.last.next if self.last is not None else next(iter(self.graph.nodes))
        while node.op != "root":
            if node.op == "get_attr":
                with compat.computing_really():
                    self.real[node] = self.constants[str(node.target)].clone()
            elif node.op == "call_function" and node not in self.real:
                self._compute(node)
            self.last, node = node, node.next

    def _compute(self, node: fx.Node) -> None:
        tags = getattr(node.target, "tags", ())
        computable = all(x in self.real for x in node.all_input_nodes) and torch.Tag.nondeterministic_seeded not in tags
        if computable:
            with compat.computing_really():
                self.real[node] = _call(node.target, node.args, node.kwargs, self.real)
            self.computed.append(node)
            return
        for written in written_operands(node):  # its value is unknown now, and so is what shares its memory
            if written in self.real:
                storage = _storage(self.real[written])
                for alias in [n for n, x in self.real.items() if _storage(x) == storage]:
                    del self.real[alias]

    def guards(self, names: Mapping[fx.Node, str]) -> Guards:
        """The computation that checks whether another batch has the same values. names: name of each placeholder."""
        needed = {node for asked in self.asked for node in _nodes(asked.args, asked.kwargs)}
        storages = {_storage(self.real[n]) for n in needed if n in self.real}
        for node in reversed(self.computed):
            writes = [x for x in written_operands(node) if _storage(self.real.get(x)) in storages]
            if node in needed or writes:
                needed |= {node, *node.all_input_nodes}
                storages |= {_storage(self.real[x]) for x in (node, *node.all_input_nodes) if x in self.real}
        calls = [
            TracedCall(node, node.target, node.args, dict(node.kwargs)) for node in self.computed if node in needed
        ]
        copies = any(written_operands(node) for node in self.computed if node in needed)
        inputs = {node: names[node] for node in needed if node in names}
        constants = {n: self.real[n] for n in needed if n.op == "get_attr"}
        return Guards(inputs, constants, calls, list(self.asked), copies)


@dataclass
class Guards:
    """Values of the batch on which a captured graph depends."""

    inputs: dict[fx.Node, str] = field(default_factory=dict)
    constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    calls: list[TracedCall] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    copies: bool = False  # whether a call writes into its operands

    def __bool__(self) -> bool:
        return bool(self.asked)

    def broken(self, batch: Mapping[str, torch.Tensor]) -> str | None:
        """A message if a batch, given by tensor names, has another value than the captured one, else None."""
        with compat.computing_really():
            real: dict[fx.Node, Any] = {n: batch[k].detach() for n, k in self.inputs.items()}
            if self.copies:
                real = {n: x.clone() for n, x in real.items()}
            real |= self.constants
            for call in self.calls:
                real[call.node] = _call(call.target, call.args, call.kwargs, real)
            for asked in self.asked:
                now = _call(asked.target, asked.args, asked.kwargs, real)
                if not _same(now, asked.value):
                    return f"{asked.line} gives {_shown(now)}, not {_shown(asked.value)}"
        return None


def _nodes(*trees: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(trees, lambda node: nodes.append(node) or node)  # pyright: ignore[reportArgumentType]
    return nodes


def _call(target: Any, args: Any, kwargs: Any, real: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((args, kwargs), lambda node: real[node])
    return target(*args, **kwargs)


def base_of(node: fx.Node) -> fx.Node:
    """The base of a chain of views. An output of a call that returns several new tensors is one."""
    while node.op == "call_function" and node.all_input_nodes and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # pyright: ignore[reportArgumentType]
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(x.alias_info is not None for x in schema.returns)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a call writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    arguments = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    written = [arguments.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _nodes(written)


def _storage(x: Any) -> int:
    return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) and x.layout is torch.strided else id(x)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _shown(value: Any) -> str:
    text = " ".join(str(value.tolist() if isinstance(value, torch.Tensor) else value).split())
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
