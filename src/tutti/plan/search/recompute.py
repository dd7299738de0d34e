"""Selects the operators of the forward pass to recompute: the cheapest that reduce activations to a number of bytes.

Let k(x) be whether the result of an operator x is kept and a(x) whether it is recomputed, with bytes m(x) and seconds
t(x) over all layers that share its label:

    least sum t(x) a(x)   with   sum m(x) k(x) <= memory
    k(x) + a(x) >= 1      for x that the backward pass reads
    a(y) <= k(x) + a(x)   for x that y reads; a(y) <= k(x) if x is in another layer

So a layer is recomputed from its kept activations and its inputs. This is an integer program (HiGHS). It does not count
the recomputed activations of one layer, which are in memory at the same time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import fx

from tutti.ir.costs import FREE, flat
from tutti.ir.kind import Kind, kind_of
from tutti.ir.labels import is_layer, layer_of
from tutti.ir.step_graph import BACKWARD, FORWARD, Call, StepGraph
from tutti.ops import source
from tutti.ops.products.scaled_mm import ROUND_OPERAND
from tutti.plan.variant import ATTENTION, LAYERS

SMALL = 1e-6  # weight of the secondary objective, time or memory
GAP, BRANCHES = 1e-3, 1000  # relative gap and node limit of the integer program


class Activations:
    """The activations of a step's forward pass and their readers, by label.

    bytes: bytes of all results of a label that are read.
    nodes: number of nodes of a label.
    needed: labels that the backward pass reads.
    inside, across: pairs (label, reader) in the forward pass, within one layer and between layers.
    attention: labels of attention; see `chosen`.
    """

    def __init__(self, step: StepGraph):
        self.bytes: Counter[str] = Counter()
        self.nodes: Counter[str] = Counter()
        self.example: dict[str, Call] = {}
        self.needed: set[str] = set()
        self.fixed: set[str] = set()  # labels that the backward pass of other layers reads
        self.never: set[str] = set()  # readers of buffers that may change before the backward pass
        changed = {step.inputs[name] for name in step.state_names if kind_of(name) == Kind.BUFFER}
        self.inside: set[tuple[str, str]] = set()
        self.across: set[tuple[str, str]] = set()
        self.attention = set(_attention(step))
        counted: set[tuple[fx.Node, int]] = set()
        for node in step.calls:
            if node.target in FREE:
                continue
            phase, label = node.meta["phase"], node.meta["label"]
            if phase == FORWARD:
                self.nodes[label] += 1
                self.example[label] = node
            for x, index in map(made_by, node.all_input_nodes):
                if x in changed:
                    self.never.add(label)
                if x.op != "call_function" or x.meta["phase"] != FORWARD:
                    continue
                if (x, index) not in counted:
                    counted.add((x, index))
                    self.bytes[x.meta["label"]] += flat(x.meta["val"])[index].bytes
                apart = layer_of(x.meta["path"]) != layer_of(node.meta["path"])
                if phase == FORWARD:
                    (self.across if apart else self.inside).add((x.meta["label"], label))
                elif phase == BACKWARD:
                    self.needed.add(x.meta["label"])
                    if apart:
                        self.fixed.add(x.meta["label"])

    @property
    def inside_layers(self) -> set[str]:
        """Labels of activations in numbered layers that no other layer reads."""
        read = self.fixed | {x for x, _ in self.across}
        return {x for x, node in self.example.items() if is_layer(layer_of(node.meta["path"]))} - read - self.never

    @property
    def whole(self) -> int:
        """Bytes of activations without recomputation."""
        return sum(self.bytes[label] for label in self.needed)

    def recompute(self, memory: float, seconds: Callable[[Call], float]) -> tuple[str, ...]:
        """Labels to recompute so that at most `memory` bytes of activations are kept, or as few as possible.

        seconds: returns the duration of a call.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes half a second
        from scipy.sparse import coo_array

        if not self.needed:
            return ()
        labels = list(self.nodes)
        n, at = len(labels), {label: i for i, label in enumerate(labels)}  # k, then a
        rows = [({at[x]: 1, n + at[x]: int(x not in self.fixed)}, 1) for x in sorted(self.needed)]
        for x, y in sorted(self.inside | self.across):
            if x != y:
                rows.append(({at[x]: 1, n + at[x]: int((x, y) not in self.across), n + at[y]: -1}, 0))
            elif (x, y) in self.across:
                rows.append(({at[x]: 1, n + at[x]: -1}, 0))
        i, j, v = zip(*((i, j, v) for i, (row, _) in enumerate(rows) for j, v in row.items()), strict=True)
        least = np.array([number for _, number in rows])
        needs = LinearConstraint(coo_array((v, (i, j)), shape=(len(rows), 2 * n)).tocsc(), least, np.inf)  # pyright: ignore
        size = np.array([self.bytes[x] for x in labels] + n * [0]) / max(self.whole, 1)
        time = np.array(n * [0.0] + [self.nodes[x] * seconds(self.example[x]) for x in labels])
        time /= time.sum() or 1.0
        bounds = Bounds(0, np.array(n * [1] + [int(x not in self.never) for x in labels]))  # pyright: ignore
        within = LinearConstraint(size[None], -np.inf, memory / max(self.whole, 1))
        for cost, constraints in ((time + SMALL * size, [needs, within]), (size + SMALL * time, [needs])):
            solution = milp(cost + SMALL**2, constraints=constraints, integrality=np.ones(2 * n), bounds=bounds,
                        options={"mip_rel_gap": GAP, "node_limit": BRANCHES})  # fmt: skip
            if solution.x is not None:
                return tuple(x for x, a in zip(labels, solution.x[n:], strict=True) if a > 0.5)
        return ()


def chosen(step: StepGraph, activations: Activations, words: Collection[str]) -> set[str]:
    """The labels of forward nodes that these words name.

    words: labels; `layers`, all values that only their own layer reads; `attention`; names of operators, as `silu`,
    `tutti.glu` or `*norm*`. Labels that the step lacks, and nodes that read a buffer which the step changes, are
    ignored. Raises ValueError if a name matches no operator of the forward pass.
    """
    names = {label: operator_name(node) for label, node in activations.example.items()}
    labels: set[str] = set()
    for word in words:
        if word == LAYERS:
            labels |= activations.inside_layers
        elif "/" in word:
            labels.add(word)
        else:
            attention = names.keys() & activations.attention if word == ATTENTION else ()
            same = attention or {label for label, name in names.items() if matches(name, word)}
            if not same:
                near = get_close_matches(word, {name.partition(".")[2] for name in names.values()}, 1)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise ValueError(f"no operator of the forward pass is named {word!r}{hint}")
            labels |= same | {x for x, node in activations.example.items() if _rounds_one_of(node, same)}
    return labels - activations.never


def _rounds_one_of(node: Call, labels: Collection[str]) -> bool:
    """Whether a call rounds the result of an operator with one of these labels for products in low precision. It would
    otherwise be kept in place of that result."""
    return node.target is ROUND_OPERAND and made_by(node.args[0])[0].meta["label"] in labels


def operator_name(node: fx.Node) -> str:
    """`aten.silu` of aten.silu.default."""
    return str(node.target).rpartition(".")[0] or str(node.target)


def matches(name: str, word: str) -> bool:
    """Whether a word is the name of an operator, with or without its namespace."""
    return fnmatchcase(name, word) or fnmatchcase(name.partition(".")[2], word)


def _attention(step: StepGraph) -> Iterator[str]:
    """Labels of fused attention, and of a softmax with what lies between it and the products before and after it."""
    products, softmax = {torch.ops.aten.bmm.default}, torch.ops.aten._softmax.default
    for node in step.calls:
        if node.meta["phase"] == FORWARD and "attention" in str(node.target):
            yield node.meta["label"]
        elif node.meta["phase"] == FORWARD and node.target is softmax:
            before = _until(products, node, lambda n: n.all_input_nodes)
            after = _until(products, node, lambda n: n.users)
            if any(n.target in products for n in before) and any(n.target in products for n in after):
                yield from (n.meta["label"] for n in {*before, *after})


def _until(products: set, start: Call, beside: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    """The forward calls of one layer reached from a call, up to matrix products, which are included."""
    reached, todo = [start], [start]
    while todo:
        node = todo.pop()
        for n in beside(node) if node.target not in products else ():
            same = n.op == "call_function" and n.target is not operator.getitem and n.meta["phase"] == FORWARD
            if same and n not in reached and layer_of(n.meta["path"]) == layer_of(start.meta["path"]):
                reached.append(n)
                todo.append(n)
    return reached


def made_by(node: fx.Node) -> tuple[fx.Node, int]:
    """The call or input whose memory a node views, and the index of its output."""
    maker, index = source(node)
    while maker.op == "call_function" and maker.target in FREE:
        maker, index = source(maker.args[0])  # pyright: ignore[reportArgumentType]
    return maker, index
