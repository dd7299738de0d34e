"""Tiers of a Program: fetch what is stored outside the device where it is needed, and update state where it is stored.

meta["tier"] names the tier of inputs stored outside the device, and of forward results that are offloaded until the
backward pass. With it:

- operators of the forward and backward pass read a copy. It is fetched once for each stretch of a pass in one layer,
  when the stretch before starts, and freed after its last reader there;
- an update of state on another tier is computed by the host (meta["host"]), in place. The device lends it the other
  operands. If the outer tier is the disk of a CPU, host and device share their memory;
- updates run as soon as their gradient is ready and the old parameter is no longer read (`lower.memory.early_updates`),
  to free gradients early.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.kind import NUMBERS, kind_of, path_of
from tutti.ir.labels import layer_of
from tutti.ir.step_graph import BACKWARD, UPDATE, Call
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.memory.aliasing import behind_views
from tutti.lower.memory.early_updates import early
from tutti.lower.memory.inplace import written
from tutti.lower.memory.transfers import arrived, bring, fetch, lend, put, store
from tutti.nn.adam import IN_PLACE
from tutti.plan.tier import DEVICE, HOST

aten = torch.ops.aten
ORIGIN = ("phase", "path", "label")
COPIES = (aten._to_copy.default, aten.clone.default)


def use_tiers(graph: fx.Graph) -> None:
    """Insert the transfers for the tiers named by a graph's nodes, in place."""
    if not any(node.meta.get("tier", DEVICE) != DEVICE for node in graph.nodes):
        return
    placer = _Placer(graph)
    placer.put_aside()
    placer.update_at_home()
    placer.compute_at_home()
    placer.keep_results()
    placer.fetch_for_readers()
    early(graph, placer.moved)
    graph.eliminate_dead_code()


class _Placer:
    """at: tier of every value outside the device, views included, and of results of the host. moved: all nodes of
    updates that the host computes."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.at: dict[fx.Node, str] = {}
        self.moved: set[fx.Node] = set()
        self.homes: set[fx.Node] = set()  # inputs
        self.aside: dict[fx.Node, fx.Node] = {}  # results of the forward pass -> their copy on another tier
        self.copies: dict[fx.Node, fx.Node] = {}  # results of the host -> their copy on the device
        self.position: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node.op == "placeholder" and node.meta.get("tier", DEVICE) != DEVICE:
                self.at[node] = node.meta["tier"]
                self.homes.add(node)

    def emit(self, target, args: tuple, like: fx.Node, before: fx.Node, *val) -> fx.Node:
        """Insert a call with the meta of another, and the spec of its first operand unless `val` is given."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        spec = val[0] if val else args[0].meta["val"]
        node.meta = {key: like.meta[key] for key in ORIGIN if key in like.meta} | {"val": spec}
        return node

    # -- activations --------------------------------------------------------------------------------------------------

    def put_aside(self) -> None:
        """Offload results of the forward pass that the backward pass reads."""
        for node in list(self.graph.nodes):
            tier = node.meta.get("tier", DEVICE)
            if node.op != "call_function" or tier == DEVICE:
                continue
            del node.meta["tier"]
            parts = [user for user in node.users if user.target is operator.getitem]
            for x in parts if isinstance(node.meta["val"], tuple) else [node]:
                if x.meta["val"] is None or x.meta.get("phase") == BACKWARD:  # a loss may have its gradients
                    continue
                if any(r.meta.get("phase") == BACKWARD for r in behind_views(x)):
                    copy = self.emit(put, (x, tier), x, x.next)
                    copy.meta["tier"] = tier
                    self.aside[x] = copy

    # -- updates ------------------------------------------------------------------------------------------------------

    def update_at_home(self) -> None:
        """Make updates of state on another tier write there. Other operands that they write are copied first."""
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        for node in [n for n in self.graph.nodes if n.target in IN_PLACE]:
            if not any(x in self.at for x in node.all_input_nodes):
                continue
            in_place, lists, targets = IN_PLACE[node.target]
            operands: list[Call] = list(node.args[:lists])
            for i in targets:
                last = max(position[user] for user in (node, *behind_views(operands[i])))
                if operands[i].op != "placeholder" or last > position[node]:
                    operands[i] = self.emit(aten.clone.default, (operands[i],), node, node)
                    self.moved.add(operands[i])
            call = self.emit(in_place, (*[[x] for x in operands], *node.args[lists:]), node, node, None)
            call.kwargs = node.kwargs
            for part in list(node.users):  # getitem
                old = operands[targets[part.args[1]]]  # pyright: ignore[reportArgumentType]
                new = self.emit(written, (call, old), node, node, part.meta["val"])
                part.replace_all_uses_with(new)
                self.graph.erase_node(part)
            self.graph.erase_node(node)

    def compute_at_home(self) -> None:
        """Run updates that read state on another tier on the host, and lend it their other operands."""
        self.spread()
        lent: dict[fx.Node, fx.Node] = {}
        for node in [n for n in self.graph.nodes if n in self.at and n.op == "call_function" and n.target is not put]:
            tier = self.at[node]
            if node.target in FREE:
                if any(map(_made_by_host, node.all_input_nodes)):
                    node.meta["host"] = tier
                continue
            self.moved.add(node)
            if node.target is not written:
                node.meta["host"] = tier
            if tier != HOST:  # the disk of a CPU: host and device share memory
                continue
            node.meta["tier"] = tier
            for x in node.all_input_nodes:
                number = kind_of(x.meta.get("input", "")) in NUMBERS
                if x in self.at or number or x.meta["val"] is None:
                    continue
                if x not in lent:
                    lent[x] = self.emit(lend, (x,), node, node)
                    lent[x].meta["tier"] = self.at[lent[x]] = tier
                    self.moved.add(lent[x])
                node.replace_input_with(x, lent[x])

    def spread(self) -> None:
        """Updates of state on another tier run on the host, as do views of that state and copies for such updates."""
        for node in self.graph.nodes:
            if node.op != "call_function" or node in self.at or node.target in COLLECTIVES:
                continue
            homes = [self.at[x] for x in node.all_input_nodes if x in self.at]
            if homes and (node.target in FREE or node.meta.get("phase") == UPDATE):
                self.at[node] = homes[0]
        for node in reversed(self.graph.nodes):
            copied = node.target in COPIES and node.meta.get("phase") == UPDATE and node not in self.at
            if copied and node.users and all(user in self.at for user in node.users):
                self.at[node] = next(self.at[user] for user in node.users)

    def keep_results(self) -> None:
        """Copy successors of inputs on another tier, and results computed there, into these inputs."""
        output = self.graph.output_node()
        inputs = {node.meta["input"]: node for node in self.graph.nodes if node.op == "placeholder"}
        results: list[Call] = list(output.args[0])  # pyright: ignore[reportArgumentType]
        for i, (name, value) in enumerate(zip(output.meta["names"], results, strict=True)):
            home = inputs.get(name)
            there = home is None or value is home or (value.target is written and value.args[1] is home)
            if not there and (value in self.at or home in self.at):
                results[i] = self.emit(store, (home, value), value, output)
                self.moved.add(results[i])
        output.args = (tuple(results),)

    # -- forward and backward pass ------------------------------------------------------------------------------------

    def fetch_for_readers(self) -> None:
        """Fetch copies for readers on the device."""
        stretch, before = None, None
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node in self.moved or node in self.at or node.target in FREE:
                continue
            for x in node.all_input_nodes:
                base = self.base(x, node)
                if base in self.homes or base in self.aside:
                    key = node.meta.get("phase"), layer_of(node.meta.get("path") or _module(base))
                    if stretch is None or stretch.key != key:
                        stretch, before = _Stretch(key, node), stretch
                    node.replace_input_with(x, self.version(x, node, stretch, before))
                elif self.at.get(x) == HOST and node.op != "output":
                    node.replace_input_with(x, self.brought(x))

    def base(self, x: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The value on another tier of which a device's reader uses a view, or None."""
        while True:
            if x in self.homes or (x in self.aside and reader.meta.get("phase") == BACKWARD):
                return x
            if x.op != "call_function" or x.target not in FREE:
                return None
            x = x.args[0]  # pyright: ignore[reportAssignmentType]

    def version(self, x: fx.Node, reader: fx.Node, stretch: _Stretch, before: _Stretch | None) -> fx.Node:
        """Return the copy on the device for the readers of a stretch. Copies of the previous stretch are reused."""
        if x in stretch.copies:
            return stretch.copies[x]
        if before and x in before.copies:
            stretch.copies[x] = before.copies[x]
        elif x in self.homes or x in self.aside:
            home = self.aside.get(x, x)
            first = before.first if before else reader
            if home.op == "call_function" and not self.stands_before(home, first):
                first = reader
            copy = self.emit(fetch, (home,), reader, first)
            stretch.copies[x] = self.emit(arrived, (copy,), reader, reader)
        else:
            source = self.version(x.args[0], reader, stretch, before)  # pyright: ignore[reportArgumentType]
            with self.graph.inserting_before(reader):
                view = self.graph.node_copy(x, lambda n: source)
            view.meta = {**x.meta, "phase": reader.meta.get("phase")}
            stretch.copies[x] = view
        return stretch.copies[x]

    def stands_before(self, node: fx.Node, other: fx.Node) -> bool:
        """Return whether a node's result is offloaded before another node runs."""
        if not self.position:
            self.position = {n: i for i, n in enumerate(self.graph.nodes)}
        return self.position[node] < self.position[other]

    def brought(self, x: fx.Node) -> fx.Node:
        if x not in self.copies:
            self.copies[x] = self.emit(bring, (x,), x, x.next)
        return self.copies[x]


class _Stretch:
    """Consecutive readers of one layer in one pass. copies: copy of each operand on the device."""

    def __init__(self, key: tuple, first: fx.Node):
        self.key, self.first = key, first
        self.copies: dict[fx.Node, fx.Node] = {}


def _made_by_host(x: fx.Node) -> bool:
    """Return whether the host computes a value. The result of writing into an input is available from the beginning."""
    while x.target is written:
        x = x.args[1]  # pyright: ignore[reportAssignmentType]
    return "host" in x.meta


def _module(node: fx.Node) -> str:
    """The path of the module that owns a parameter."""
    return path_of(node.meta.get("input", "")).rpartition(".")[0]
