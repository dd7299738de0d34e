"""Parts: which calls of a Program can be computed in parts, so that one part computes while another communicates.

A part is to time what a rank is to space. A call is computed in parts by choosing a factor of its rule, as if a mesh
axis of that many ranks split it; the layout of a value over the parts is a `Split` of one of its dims. From collectives
between computations, the split is propagated through the graph, in both directions, as far as rules allow; reshapes and
gathers make it strided. Among the dims and collectives where it could start, those are chosen with the most FLOPs
between two collectives. Mostly that is the batch, or, if it does not divide, the sequence from one attention to the
next.

    in parts      all that is reached and between collectives
    whole         calls that only prepare operands for these or read their results, if that joins no more bytes
    as a sum      calls that contract the split dim (gradients of weights), if adding moves fewer bytes than joining
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from tutti.ir.costs import FREE, flat
from tutti.ir.kind import Kind, kind_of
from tutti.ir.op_info import FLOPS
from tutti.ir.step_graph import UPDATE
from tutti.lower.collectives import COLLECTIVES, all_gather, all_to_all, exchange, reduce_scatter
from tutti.lower.shard import ARRANGED
from tutti.ops import Rule, operands, parse, rule_of, source, specs
from tutti.ops.view import names
from tutti.plan.layouts.choice import Choice, input_placement, output_placement
from tutti.plan.layouts.layout import Partial, Placement, R, Split

aten = torch.ops.aten
ROW = "row!"  # name for the leading dim of a collective's operand
LINES: dict[object, tuple[str, str]] = {all_gather: ("", ROW), reduce_scatter: (ROW, ""), all_to_all: (ROW, ROW)}
ARRANGING = tuple(arrange for _, arrange in ARRANGED)


@dataclass(frozen=True)
class InParts:
    """The layouts, over the parts, of a call's operands and outputs."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


def in_parts(graph: fx.Graph, count: int) -> dict[fx.Node, InParts]:
    """Find the calls to compute in `count` parts."""
    return _Search(graph, count).run()


class _Search:
    def __init__(self, graph: fx.Graph, count: int):
        self.graph, self.count = graph, count
        self.calls = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        self.rules: dict[fx.Node, Rule | None] = {}
        self.cache: dict[tuple, InParts | None] = {}  # of `follow`
        self.taken: dict[fx.Node, InParts] = {}

    def run(self) -> dict[fx.Node, InParts]:
        for region in sorted(self.regions(), key=self.worth, reverse=True):
            self.taken = region | self.taken
        while self.peel():
            pass
        self.keep_regions()
        self.taken |= self.sums()
        return self.taken

    def regions(self) -> Iterator[dict[fx.Node, InParts]]:
        """Yield the calls reached from each collective, for each way to split it."""
        seen: set[tuple[fx.Node, InParts]] = set()
        for seed in self.seeds:
            for how in self.beginnings(seed):
                if (seed, how) not in seen:
                    region = self.reached(seed, how)
                    seen.update((n, region[n]) for n in self.seeds if n in region)
                    yield region

    @cached_property
    def seeds(self) -> dict[fx.Node, None]:
        """The collectives on values computed from the batch, with matrix products or similar work after them."""
        moving: set[fx.Node] = set()
        for node in self.graph.nodes:
            if kind_of(node.meta.get("input", "")) == Kind.BATCH or any(x in moving for x in node.all_input_nodes):
                moving.add(node)
        before: set[fx.Node] = set()  # computed values
        for node in reversed(self.graph.nodes):
            if self.divisible(node) and any(self.divisible(u) and (u in before or _heavy(u)) for u in node.users):
                before.add(node)
        kinds = COLLECTIVES.keys() - {exchange}  # the layout of its rows depends on the data
        return {n: None for n in self.calls if n.target in kinds and n in moving and n in before}

    def divisible(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.meta.get("phase") != UPDATE

    def rule(self, node: fx.Node) -> Rule | None:
        if node not in self.rules:
            self.rules[node] = local_rule(node) if self.divisible(node) else None
        return self.rules[node]

    def worth(self, region: dict[fx.Node, InParts]) -> tuple[int, int, int]:
        """(FLOPs between two of a region's collectives, number of its collectives, all FLOPs). Parts wait for each
        other at all other collectives."""
        before, behind = set(), set()
        for node in (n for n in self.calls if n in region):
            if any(n in before or n in self.seeds for n in self.makers(node, region)):
                before.add(node)
        for node in (n for n in reversed(self.calls) if n in region):
            if node in behind or node in self.seeds:
                behind.update(self.makers(node, region))
        flops = {node: FLOPS[node.target](node) for node in region if _heavy(node)}
        between = sum(n for node, n in flops.items() if node in before and node in behind)
        return between, sum(node in self.seeds for node in region), sum(flops.values())

    def makers(self, node: fx.Node, region: dict[fx.Node, InParts]) -> Iterator[fx.Node]:
        """Yield the calls whose results a call reads part by part."""
        for x, at in zip(operands(node), region[node].ins, strict=True):
            maker, output = source(x)
            if isinstance(at, Split) and maker in region and region[maker].outs[output] == at:
                yield maker

    def beginnings(self, seed: fx.Node) -> Iterator[InParts]:
        """Yield the ways to split a collective into parts."""
        (x,), rule = operands(seed), self.rule(seed)
        assert rule is not None
        around = [self.rule(n) for n in (source(x)[0], *seed.users)]
        for factor, size in rule.sizes.items():
            outers = {1} | {n for r in around if r for n in _places(r, size)}
            for outer in sorted(outers):
                if size % (outer * self.count) == 0 and (how := self.how(rule, Choice(factor, outer))):
                    yield how

    def how(self, rule: Rule, choice: Choice) -> InParts | None:
        """Split a call by a choice. None if its rule does not allow it, or if operands would be partial sums."""
        size = rule.sizes[choice.factor]
        if choice.factor in rule.whole | rule.local or size % (choice.outer * self.count):
            return None
        ins = tuple(input_placement(rule, choice, i) for i in range(len(rule.inputs)))
        outs = tuple(output_placement(rule, choice, i) for i in range(len(rule.outputs)))
        right = all(isinstance(p, Split) or p == Partial() for p in outs)
        return InParts(ins, outs) if right and not any(isinstance(p, Partial) for p in ins) else None

    def follow(self, *key) -> InParts | None:
        """Cached version of `followed`."""
        if key not in self.cache:
            self.cache[key] = self.followed(*key)
        return self.cache[key]

    def followed(self, node: fx.Node, output: bool, number: int, split: Split) -> InParts | None:
        """Split a call so that one of its operands or outputs has this split. None if its rule does not allow it."""
        rule = self.rule(node)
        dims = rule and (rule.outputs if output else rule.inputs)[number]
        if not rule or not dims or split.dim >= len(dims):
            return None
        outside = 1
        for factor in dims[split.dim]:
            outer, rest = divmod(split.outer, outside)
            if not rest and outer and (how := self.how(rule, Choice(factor, outer))):
                return how
            outside *= rule.sizes[factor]
        return None

    def reached(self, seed: fx.Node, how: InParts) -> dict[fx.Node, InParts]:
        """Return all calls that a split propagates to."""
        region: dict[fx.Node, InParts] = {}
        todo = deque([(seed, how)])
        while todo:
            node, how = todo.popleft()
            if node in region or not any(isinstance(p, Split) for p in how.outs):
                continue
            region[node] = how
            for x, at in zip(operands(node), how.ins, strict=True):
                maker, i = source(x)
                if isinstance(at, Split) and (next_ := self.follow(maker, True, i, at)):
                    todo.append((maker, next_))
            for reader, number, i in _readers(node):
                at = how.outs[i]
                if isinstance(at, Split) and (next_ := self.follow(reader, False, number, at)):
                    todo.append((reader, next_))
        return region

    def split(self, x: fx.Node) -> Placement:
        """Return the layout of a value over the parts: R if it is computed whole."""
        maker, i = source(x)
        return self.taken[maker].outs[i] if maker in self.taken else R

    def peel(self) -> bool:
        """Remove calls that need not be computed in parts. Returns whether there was one."""
        count = len(self.taken)
        for node in [n for n in self.calls if n in self.taken and not self.benefits(n)]:
            if not any(isinstance(self.split(x), Split) for x in operands(node)):
                del self.taken[node]  # all its operands are whole
        for node in [n for n in reversed(self.calls) if n in self.taken and not self.benefits(n)]:
            if not any(self.reads_part(*reader, node) for reader in _readers(node)) and self.cheaper_whole(node):
                del self.taken[node]
        return len(self.taken) < count

    def benefits(self, node: fx.Node) -> bool:
        """Return whether it pays to compute a call in parts for its own sake: it takes long, or communicates."""
        return _heavy(node) or node.target in COLLECTIVES

    def reads_part(self, reader: fx.Node, number: int, output: int, node: fx.Node) -> bool:
        return reader in self.taken and self.taken[reader].ins[number] == self.taken[node].outs[output]

    def cheaper_whole(self, node: fx.Node) -> bool:
        """Return whether joining the operands of a call moves fewer bytes than joining its results."""
        roots = {self.root(x) for x in operands(node) if isinstance(self.split(x), Split)}
        mine = sum(spec.bytes for spec in specs(node) if spec.dtype)
        joined = sum(_bytes(x) for x in roots if not self.joined(x, node))
        return joined < mine or (joined == mine and node.target in ARRANGING)

    def root(self, x: fx.Node) -> fx.Node:
        """Return the value to join for this one: itself, or the value it is a view of."""
        while x.target in FREE and x.target is not operator.getitem and x in self.taken:
            x = x.all_input_nodes[0]
        return x

    def joined(self, x: fx.Node, but: fx.Node) -> bool:
        """Return whether another call needs a value whole."""
        for user in x.users:
            if user is but:
                continue
            if user.op == "output" or (user.target is not operator.getitem and user not in self.taken):
                return True
            if user.target in FREE and user.target is not operator.getitem and self.joined(user, but):
                return True
        return False

    def keep_regions(self) -> None:
        """Keep only calls connected to a collective, and to work that could overlap with it."""
        beside: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.taken:
            for maker in self.makers(node, self.taken):
                beside[node].append(maker)
                beside[maker].append(node)
        seen: set[fx.Node] = set()
        for node in list(self.taken):
            region, todo = [], [node]
            while todo:
                n = todo.pop()
                if n not in seen:
                    seen.add(n)
                    region.append(n)
                    todo += beside[n]
            if region and not (any(n in self.seeds for n in region) and any(map(_heavy, region))):
                for n in region:
                    del self.taken[n]

    def sums(self) -> dict[fx.Node, InParts]:
        """Return calls that contract a split dim, if adding their parts moves fewer bytes than joining the operands."""
        contractions: dict[fx.Node, InParts] = {}
        readers: dict[fx.Node, int] = defaultdict(int)
        for node in self.calls:
            if node in self.taken:
                continue
            for number, x in enumerate(operands(node)):
                at = self.split(x)
                how = self.follow(node, False, number, at) if isinstance(at, Split) else None
                if how and all(isinstance(p, Partial) for p in how.outs):
                    contractions[node] = how
                    break
        roots = {n: {self.root(x) for x in operands(n) if isinstance(self.split(x), Split)} for n in contractions}
        for those in roots.values():
            for x in those:
                readers[x] += 1
        return {
            node: how
            for node, how in contractions.items()
            if 3 * _bytes(node) * (self.count - 1) < sum(2 * _bytes(x) / readers[x] for x in roots[node])
        }


def local_rule(node: fx.Node) -> Rule | None:
    """Return the rule of a Program's call: an operator, a collective, or a copy that rearranges memory."""
    if not isinstance(node.target, torch._ops.OpOverload) and node.target not in ARRANGING:
        return None
    if node.target is exchange:
        return None
    if node.target in COLLECTIVES or node.target in ARRANGING:
        left, right = LINES.get(node.target, ("", ""))
        shape = operands(node)[0].meta["val"].shape
        dims = " ".join(names(shape[1:] if left else shape))
        out_shape = node.meta["val"].shape
        return parse(f"{left} {dims} -> {right} {dims}", [shape], [out_shape])
    return rule_of(node)


def _heavy(node: fx.Node) -> bool:
    return node.target in FLOPS


def _bytes(x: fx.Node) -> int:
    return sum(spec.bytes for spec in flat(x.meta["val"]))


def _places(rule: Rule, size: int) -> Iterator[int]:
    """The strides at which a factor can start in a dim of this size."""
    for dims in (*rule.inputs, *rule.outputs):
        for factors in dims:
            outside = 1
            for factor in factors if rule.shape((factors,)) == (size,) else ():
                yield outside
                outside *= rule.sizes[factor]


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, int, int]]:
    """(reader, index of its operand, index of this call's output) for all readers of a call."""
    values = [(u, u.args[1]) for u in node.users if u.target is operator.getitem] or [(node, 0)]
    for value, output in values:
        for user in value.users:
            if user.op == "call_function":
                for number, x in enumerate(operands(user)):
                    if x is value:
                        yield user, number, output  # pyright: ignore[reportReturnType]
