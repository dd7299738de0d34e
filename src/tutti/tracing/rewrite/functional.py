"""Functionalization: in-place operators of a traced graph become pure ones.

Most of them write into a tensor that an operator made, or into a slice of one, and no other view of it is read later.
These are replaced in the graph. What remains is traced again, which takes as long as the first time.
"""

from __future__ import annotations

import torch
from torch import fx

from tutti.ir.step_graph import FORWARD, Call
from tutti.ir.values import base_of, written_operands
from tutti.tracing.trace.trace import Traced, sign, trace

aten = torch.ops.aten
# The operator that puts a part back, for views of a part.
BACK = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
PURE = {aten.bernoulli_.float: aten.bernoulli.p}  # where the pure operator has another name
# Their results have the dtype of the tensor that is written; others promote it to that of their operands.
CASTING = (aten.copy_, aten.fill_, aten.masked_fill_, aten.scatter_, aten.zero_, aten.bernoulli_, aten.index_put_)
MARKS = ("path", "checkpoint", "grad", "differentiable", "phase", "val")


def functionalize(traced: Traced, fakes: list[torch.Tensor]) -> Traced:
    """An equal graph without mutation. The given graph is changed, but stays equal.

    fakes: fake inputs of the graph, in order; their mode must be active. Nodes keep `phase` and `path`.
    """
    _replace(traced.graph)
    if not any(_mutates(node) for node in traced.graph.nodes):
        return traced
    again = _Signing(fx.GraphModule(traced.constants, traced.graph))
    return trace(torch.func.functionalize(again.run), *fakes)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _replace(graph: fx.Graph) -> None:
    """Replace in-place operators whose effect is plain."""
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    views: dict[fx.Node, list[fx.Node]] = {}
    if not any(map(_mutates, nodes)):
        return
    for node in nodes:
        if (base := base_of(node)) is not node:
            views.setdefault(base, []).append(node)
    for node in nodes:
        if _mutates(node) and (pure := _pure(node)):
            _replace_one(graph, node, pure, order, views)


def _replace_one(graph: fx.Graph, node: Call, pure, order: dict[fx.Node, int], views: dict[fx.Node, list[fx.Node]]
                 ) -> None:  # fmt: skip
    written, *rest = node.args
    base, now = base_of(written), order[node]
    if base.op != "call_function" or not (written is base or (written.target in BACK and written.args[0] is base)):
        return
    other_views = [x for x in views.get(base, ()) if x not in (written, node) and order[x] < now]
    if any(order[user] > now for x in other_views for user in x.users):
        return
    with graph.inserting_before(node):
        pure_call = graph.call_function(pure, (written, *rest), node.kwargs)
        pure_call.meta = {key: node.meta[key] for key in MARKS if key in node.meta}
        whole = pure_call
        if written is not base:
            whole = graph.call_function(BACK[written.target], (base, pure_call, *written.args[1:]), written.kwargs)
            whole.meta = {**pure_call.meta, "val": base.meta["val"]}
    order[pure_call] = order[whole] = now
    for old, new in {base: whole, written: pure_call}.items():
        for user in [user for user in old.users if order[user] > now]:
            user.replace_input_with(old, new)
    node.replace_all_uses_with(pure_call)
    graph.erase_node(node)
    later = [x for x in views.pop(base, ()) if x is not node and order[x] > now]
    if whole is pure_call:
        views[pure_call] = later
    else:
        views[whole] = [x for x in later if base_of(x) is whole]
        views[pure_call] = [x for x in later if base_of(x) is pure_call]


def _pure(node: Call):
    """The pure operator for an in-place one that writes its first operand; None if there is none."""
    packet, name = node.target.overloadpacket, node.target._overloadname
    plain = getattr(aten, packet.__name__.removesuffix("_"), None)
    pure = PURE.get(node.target) or getattr(plain, name, None)
    if pure is None or not packet.__name__.endswith("_") or written_operands(node) != [node.args[0]]:
        return None
    schemas = node.target._schema, pure._schema
    if pure._schema.is_mutable or len({tuple(a.name for a in s.arguments if not a.kwarg_only) for s in schemas}) > 1:
        return None
    dtypes = {x.meta["val"].dtype for x in node.all_input_nodes if x is not node.args[0] and x.meta["val"].shape}
    return pure if packet in CASTING or dtypes <= {node.args[0].meta["val"].dtype} else None


class _Signing(fx.Interpreter):
    """Runs a graph under tracing, and copies the marks of its nodes to the new ones."""

    def run_node(self, n: fx.Node):
        if n.op == "call_function":
            marks = {key: n.meta[key] for key in ("path", "checkpoint", "grad", "differentiable") if key in n.meta}
            sign(
                **{
                    "path": "",
                    "checkpoint": None,
                    "differentiable": False,
                    "phase": n.meta.get("phase", FORWARD),
                    **marks,
                }
            )
        return super().run_node(n)
