"""Round a tensor along both dims at once, if a pass over the layers rounds it along one and along the other."""

from __future__ import annotations

import operator

from torch import fx

from tutti.ir.step_graph import Call
from tutti.ops.products.scaled_mm import ROUND_BOTH, ROUND_OPERAND


def round_once(graph: fx.Graph) -> None:
    """Make two roundings of a tensor in the same phase one operator that reads it once, in place. It is where the first
    was."""
    firsts: dict[tuple, Call] = {}
    node: Call
    for node in graph.find_nodes(op="call_function", target=ROUND_OPERAND):
        x, dim, name = node.args
        phase = node.meta.get("phase")
        first = firsts.setdefault((x, phase, name), node)
        if first is node or first.args[1] == dim:
            continue
        with graph.inserting_before(first):
            both: Call = graph.call_function(ROUND_BOTH, (x, name))
        by_dim = sorted((first, node), key=lambda n: n.args[1], reverse=True)  # dim 1, then dim 0
        both.meta = {**first.meta, "val": tuple(spec for n in by_dim for spec in n.meta["val"])}
        for i, old in enumerate(by_dim):
            part: Call
            for part in list(old.users):
                if part.target is operator.getitem:
                    part.args = (both, part.args[1] + 2 * i)
                    both.append(part)
            graph.erase_node(old)
        del firsts[x, phase, name]
