"""Segments: consecutive computations between two collectives, each compiled as one function.

At O1 a segment is a kernel, at O2 a layer. Equal segments are compiled once, so compile time does not grow with depth.
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
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.memory.aliasing import WRITES
from tutti.lower.memory.inplace import written
from tutti.lower.memory.transfers import TRANSFERS
from tutti.lower.overlap.order import contract
from tutti.ops.workspaces import KEEPING

SMALLEST = 3  # operators: smaller segments run faster than a call
LAYER = 8  # operators of a layer that is worth a separate function
LARGEST = 200  # operators after which the next layer starts a new function
MANY = 32  # operands of a concatenation, which the compiler would unroll
KERNEL = "kernel"  # key in the meta of a call: the kernel it is part of

# Opaque values for backward passes have no shape that the compiler could know.
BREAKS = {
    *COLLECTIVES,
    wait,
    torch.ops.tutti.keys.default,
    *TRANSFERS,
    *KEEPING,
    written,
    *WRITES,  # the compiler does not know which inputs share memory
    torch.ops.aten.embedding.default,  # raises for an index out of range; a compiled kernel would crash
}


Cut = Callable[[fx.Graph], list[list[fx.Node]]]


class Segment(NamedTuple):
    """Consecutive calls as a function. graph: its names depend on its structure only."""

    calls: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    graph: fx.Graph
    structure: str


def stretches(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The calls between two that break a compiled function, in order. In a graph ordered by units (`analysis.overlap`),
    the calls of one unit.

    The recomputation of a layer starts a new stretch: compiled together with the forward pass, it would be merged with
    the forward computation by CSE, and its values kept.
    """
    stretch: list[fx.Node] = []
    layer = None  # of the last recomputed call
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
    """The getitem calls on a call's results."""
    return [user for user in node.users if user.target is operator.getitem]


def _is_part_of_loop(node: Call) -> bool:
    return node.target is operator.getitem and node.args[0].target in LOOPS


def _is_long(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.cat.default and len(node.all_input_nodes) > MANY


def layers(graph: fx.Graph) -> list[list[fx.Node]]:
    """Split stretches at layers that occur more than once, and where they get too long. Units are not split further."""
    if any("unit" in node.meta for node in graph.nodes):
        return [stretch for stretch in stretches(graph) if len(stretch) >= SMALLEST or _is_loop(stretch)]
    runs = [list(_runs(stretch)) for stretch in stretches(graph)]
    alike = {id(run): _structure(run) for stretch in runs for run in stretch if len(run) >= LAYER}
    number = Counter(alike.values())
    groups: list[list[fx.Node]] = []
    for stretch in runs:
        whole: list[fx.Node] = []
        for run in stretch:
            if _is_loop(run):
                groups += [whole, run]
                whole = []
                continue
            own = number[alike.get(id(run), ())] > 1
            if whole and (own or len(whole) + len(run) > LARGEST):
                groups.append(whole)
                whole = []
            whole = [*whole, *run]
            if own:
                groups.append(whole)
                whole = []
        groups.append(whole)
    return [calls for calls in groups if len(calls) >= SMALLEST or _is_loop(calls)]


def _is_loop(calls: list[fx.Node]) -> bool:
    return bool(calls) and compiles(calls[0].target)


def _runs(stretch: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Consecutive calls of one layer."""
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
    """Move calls that are placed within a layer, but neither belong to it nor depend on it, in front of the layer."""
    for stretch in list(stretches(graph)):
        runs: list[list[fx.Node]] = []
        for run in _runs(stretch):
            if len(runs) > 1 and _layer(runs[-2][-1]) == _layer(run[-1]) and _may_pass(runs[-1], runs[-2]):
                between, layer = runs.pop(), runs.pop()
                runs += [between, [*layer, *run]]
            else:
                runs.append(run)
        _reorder(stretch, [node for run in runs for node in run])


def _may_pass(run: list[fx.Node], layer: list[fx.Node]) -> bool:
    """Return whether calls outside any layer can be moved before the layer in front of them."""
    own = set(layer)
    return not _layer(run[-1])[1] and not any(own.intersection(n.all_input_nodes) for n in run)


def gather_parts(graph: fx.Graph) -> None:
    """Move getitem calls right behind the call whose results they take."""
    for node in list(graph.nodes):
        for part in sorted(node.users, reverse=True):
            if part.target is operator.getitem and part.args[0] is node:
                node.append(part)


def gather_kernels(graph: fx.Graph) -> None:
    """Mark the calls of each kernel, and make them consecutive."""
    number = count()
    for stretch in list(stretches(graph)):
        _gather(stretch, number)


def _gather(calls: list[fx.Node], number: Iterator[int]) -> None:
    groups, ungrouped = [], dict.fromkeys(calls)
    for kernel in map(_trimmed, kernels(calls)):
        if sum(fuses(node) and node.target not in FREE for node in kernel) > 1:
            groups.append(kernel)
            for node in kernel:
                del ungrouped[node]
    _reorder(calls, contract(calls, [*groups, *([node] for node in ungrouped)]))
    for kernel, i in zip(groups, number):  # noqa: B905
        for node in kernel:
            node.meta[KERNEL] = i


def _trimmed(kernel: list[fx.Node]) -> list[fx.Node]:
    """Remove views of outside values with other readers, and views of results without readers inside, from a kernel."""
    inside = set(kernel)
    for node in kernel:
        if node.target in FREE and not inside.intersection(node.all_input_nodes) and node.users.keys() - inside:
            inside.discard(node)
    for node in reversed(kernel):
        if node.target in FREE and not _takes(node, inside) and not inside.intersection(node.users):
            inside.discard(node)
    return [node for node in kernel if node in inside]


def _takes(node: Call, inside: set[fx.Node]) -> bool:
    """Return whether a call takes one of several results of a call in the set."""
    return node.target is operator.getitem and node.args[0] in inside


def _reorder(calls: list[fx.Node], order: Iterable[fx.Node]) -> None:
    """Put consecutive calls into this order."""
    last: Any = calls[0].prev if calls else None
    for node in order:
        last.append(node)
        last = node


def marked(graph: fx.Graph) -> list[list[fx.Node]]:
    """The kernels marked by `gather_kernels`."""
    calls = [node for node in graph.nodes if KERNEL in node.meta]
    return [list(kernel) for _, kernel in groupby(calls, lambda node: node.meta[KERNEL])]


CUTS: dict[str, Cut] = {"O1": marked, "O2": layers}


def segments(graph: fx.Graph, level: str) -> list[list[fx.Node]]:
    """The consecutive calls that a level compiles as one function each."""
    return CUTS[level](graph) if level in CUTS else []


def borders(calls: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """The calls, inputs and outputs of consecutive calls as a function. getitem calls on the results of outside calls
    stay outside."""
    inside = set(calls)
    calls = [n for n in calls if n.target is not operator.getitem or n.args[0] in inside]
    inside = set(calls)
    inputs = list(dict.fromkeys(x for n in calls for x in n.all_input_nodes if x not in inside))
    outputs = [n for n in calls if not inside.issuperset(n.users) and not isinstance(n.meta["val"], tuple)]
    return calls, inputs, outputs


def _structure(calls: list[fx.Node]) -> tuple:
    """Return a key that is equal for calls that form equal functions (`Part.structure`)."""
    calls, inputs, outputs = borders(calls)
    number = {node: i for i, node in enumerate((*inputs, *calls))}

    def key(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return number[x]
        if isinstance(x, (tuple, list)):
            return tuple(map(key, x))
        return tuple((name, key(part)) for name, part in x.items()) if isinstance(x, dict) else repr(x)

    operations = ((node.target, key(node.args), key(node.kwargs)) for node in calls)
    return tuple(node.meta["val"] for node in inputs), tuple(operations), tuple(map(number.__getitem__, outputs))


def part_of(calls: list[fx.Node]) -> Segment:
    """Consecutive calls as a function."""
    calls, inputs, outputs = borders(calls)
    graph, mapping = fx.Graph(), {}
    for i, node in enumerate(inputs):
        mapping[node] = graph.placeholder(f"in_{i}")
    for i, node in enumerate(calls):
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
        mapping[node].name = f"n_{i}"
        mapping[node].meta = {"val": node.meta.get("val")}
    graph.output(tuple(mapping[n] for n in outputs))
    specs: list[Spec] = [n.meta["val"] for n in inputs]
    nodes = [(n.name, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]
    return Segment(calls, inputs, outputs, graph, repr((specs, nodes)))
