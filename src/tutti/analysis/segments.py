"""Segments: what a Program computes between two collectives, in parts that are compiled as one function each.

At O1 a part is a kernel, at O2 a layer. What is alike is compiled once, so that the time for it does not grow with
depth.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count, groupby
from typing import Any, NamedTuple

import torch
from torch import fx

from tutti.analysis.fusing import fuses, kernels
from tutti.ir.costs import FREE
from tutti.ir.labels import is_layer, layer_of
from tutti.ir.loops import LOOPS, compiles
from tutti.ir.step_graph import Call, Spec
from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.inplace import written
from tutti.lower.order import contract
from tutti.lower.transfers import TRANSFERS
from tutti.lower.workspace import KEEPING
from tutti.lower.writes import WRITES

SMALLEST = 3  # operators: what is smaller costs less to run than to call
LAYER = 8  # operators of a layer that is worth a function of its own
LARGEST = 200  # operators after which another layer begins another function
MANY = 32  # operands of a concatenation that the compiler would write out one by one
KERNEL = "kernel"  # in the meta of a call: the kernel that it is part of

# What layers hand their backward passes has no shape that a compiler could know.
BREAKS = {
    *COLLECTIVES,
    wait,
    torch.ops.tutti.keys.default,
    *TRANSFERS,
    *KEEPING,
    written,
    *WRITES,  # a compiler does not know which of its inputs look at the memory of others
    torch.ops.aten.embedding.default,  # an error for a token that there is not, where a kernel ends the process
}


Cut = Callable[[fx.Graph], list[list[fx.Node]]]


class Part(NamedTuple):
    """Calls that stand in a row, as a function. graph: with names that depend on its structure alone."""

    calls: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    graph: fx.Graph
    structure: str


def stretches(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The calls between two that break a compiled function, in order; where the graph was ordered by units
    (`analysis.overlap`), of one unit.

    With what is computed again of a layer a stretch begins: in one with the forward pass the compiler would compute it
    there already, beside what reads the same, and keep it.
    """
    stretch: list[fx.Node] = []
    layer = None  # of what was computed again last
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        ends = node.op == "output" or node.target in BREAKS or "host" in node.meta or _is_long(node)
        again = layer_of(node.meta["path"]) if "recompute" in node.meta else layer
        if ends or again != layer or (stretch and stretch[-1].meta.get("unit") != node.meta.get("unit")):
            layer = again
            yield stretch
            stretch = []
        if node.target in LOOPS:
            yield stretch
            if compiles(node.target):
                yield [node, *_parts(node)]
            stretch = []
        elif not ends and not _is_part_of_loop(node):
            stretch.append(node)


def _parts(node: fx.Node) -> list[fx.Node]:
    """What is taken from the results of a call, behind it (`gather_parts`)."""
    return [user for user in node.users if user.target is operator.getitem]


def _is_part_of_loop(node: Call) -> bool:
    return node.target is operator.getitem and node.args[0].target in LOOPS


def _is_long(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.cat.default and len(node.all_input_nodes) > MANY


def layers(graph: fx.Graph) -> list[list[fx.Node]]:
    """Stretches, cut around layers that have others like them, and where they get too long. Units are small enough."""
    if any("unit" in node.meta for node in graph.nodes):
        return [stretch for stretch in stretches(graph) if len(stretch) >= SMALLEST or _is_loop(stretch)]
    runs = [list(_runs(stretch)) for stretch in stretches(graph)]
    alike = {id(run): part_of(run).structure for stretch in runs for run in stretch if len(run) >= LAYER}
    number = Counter(alike.values())
    found: list[list[fx.Node]] = []
    for stretch in runs:
        whole: list[fx.Node] = []
        for run in stretch:
            if _is_loop(run):
                found += [whole, run]
                whole = []
                continue
            own = number[alike.get(id(run), "")] > 1
            if whole and (own or len(whole) + len(run) > LARGEST):
                found.append(whole)
                whole = []
            whole = [*whole, *run]
            if own:
                found.append(whole)
                whole = []
        found.append(whole)
    return [calls for calls in found if len(calls) >= SMALLEST or _is_loop(calls)]


def _is_loop(calls: list[fx.Node]) -> bool:
    return bool(calls) and compiles(calls[0].target)


def _runs(stretch: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Calls in a row that belong to one layer."""
    run: list[fx.Node] = []
    for node in stretch:
        if run and _layer(run[-1]) != _layer(node):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _layer(node: fx.Node) -> tuple[str, str]:
    layer = layer_of(node.meta.get("path", ""))
    return node.meta.get("phase", ""), layer if is_layer(layer) else ""


def gather_layers(graph: fx.Graph) -> None:
    """Bring what stands within a layer, but belongs to none and needs nothing of it, to in front of it."""
    for stretch in list(stretches(graph)):
        found: list[list[fx.Node]] = []
        for run in _runs(stretch):
            if len(found) > 1 and _layer(found[-2][-1]) == _layer(run[-1]) and _may_pass(found[-1], found[-2]):
                between, layer = found.pop(), found.pop()
                found += [between, [*layer, *run]]
            else:
                found.append(run)
        _reorder(stretch, [node for run in found for node in run])


def _may_pass(run: list[fx.Node], layer: list[fx.Node]) -> bool:
    """Whether calls that belong to no layer may be made before one that stands in front of them."""
    own = set(layer)
    return not _layer(run[-1])[1] and not any(own.intersection(n.all_input_nodes) for n in run)


def gather_parts(graph: fx.Graph) -> None:
    """Let what is taken from the results of a call stand right behind it."""
    for node in list(graph.nodes):
        for part in sorted(node.users, reverse=True):
            if part.target is operator.getitem and part.args[0] is node:
                node.append(part)


def gather_kernels(graph: fx.Graph) -> None:
    """Mark what becomes one kernel, and bring it together."""
    number = count()
    for stretch in list(stretches(graph)):
        _gather(stretch, number)


def _gather(calls: list[fx.Node], number: Iterator[int]) -> None:
    groups, rest = [], dict.fromkeys(calls)
    for kernel in map(_trimmed, kernels(calls)):
        if sum(fuses(node) and node.target not in FREE for node in kernel) > 1:
            groups.append(kernel)
            for node in kernel:
                del rest[node]
    _reorder(calls, contract(calls, [*groups, *([node] for node in rest)]))
    for kernel, i in zip(groups, number):  # noqa: B905
        for node in kernel:
            node.meta[KERNEL] = i


def _trimmed(kernel: list[fx.Node]) -> list[fx.Node]:
    """Without views of what comes from outside for others as well, and of what is made for these alone."""
    inside = set(kernel)
    for node in kernel:
        if node.target in FREE and not inside.intersection(node.all_input_nodes) and node.users.keys() - inside:
            inside.discard(node)
    for node in reversed(kernel):
        if node.target in FREE and not _takes(node, inside) and not inside.intersection(node.users):
            inside.discard(node)
    return [node for node in kernel if node in inside]


def _takes(node: Call, inside: set[fx.Node]) -> bool:
    """Whether this is one of several results of a call in there."""
    return node.target is operator.getitem and node.args[0] in inside


def _reorder(calls: list[fx.Node], order: Iterable[fx.Node]) -> None:
    """Give calls that stand in a row this order."""
    last: Any = calls[0].prev if calls else None
    for node in order:
        last.append(node)
        last = node


def marked(graph: fx.Graph) -> list[list[fx.Node]]:
    """The kernels that `gather_kernels` has marked."""
    calls = [node for node in graph.nodes if KERNEL in node.meta]
    return [list(kernel) for _, kernel in groupby(calls, lambda node: node.meta[KERNEL])]


CUTS: dict[str, Cut] = {"O1": marked, "O2": layers}


def segments(graph: fx.Graph, level: str) -> list[list[fx.Node]]:
    """What a level compiles as one function each: calls in a row."""
    return CUTS[level](graph) if level in CUTS else []


def part_of(calls: list[fx.Node]) -> Part:
    """Calls in a row as a function. What is taken from a result of several parts that is made elsewhere stays there."""
    inside = set(calls)
    calls = [n for n in calls if n.target is not operator.getitem or n.args[0] in inside]
    inside = set(calls)
    inputs = list(dict.fromkeys(x for n in calls for x in n.all_input_nodes if x not in inside))
    outputs = [n for n in calls if n.users.keys() - inside and not isinstance(n.meta["val"], tuple)]
    graph, mapping = fx.Graph(), {}
    for i, node in enumerate(inputs):
        mapping[node] = graph.placeholder(f"in_{i}")
    for i, node in enumerate(calls):
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
        mapping[node].name = f"n_{i}"
        mapping[node].meta = {}
    graph.output(tuple(mapping[n] for n in outputs))
    specs: list[Spec] = [n.meta["val"] for n in inputs]
    nodes = [(n.name, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]
    return Part(calls, inputs, outputs, graph, repr((specs, nodes)))
