"""Join two Programs that run together into one, in which each can compute while the other communicates.

`analysis.overlap` then orders the operators of both. In the given order the second follows the first.
"""

from __future__ import annotations

from torch import fx

from tutti.lower.program import Program

SECOND = " of the second"  # behind names of the second Program


def joined(first: Program, second: Program) -> Program:
    """A Program with the inputs and outputs of both, those of the first in front."""
    graph, copies = fx.Graph(), {}
    both = (first.graph, second.graph)
    for source in both:
        for node in source.find_nodes(op="placeholder"):
            copies[node] = graph.node_copy(node)
    outputs = [result for source in both for result in graph.graph_copy(source, copies)]  # pyright: ignore
    graph.output(tuple(outputs)).meta = dict(first.graph.output_node().meta)

    def named(a: dict, b: dict) -> dict:
        return a | {f"{name}{SECOND}": value for name, value in b.items()}

    inputs, results = named(first.inputs, second.inputs), named(first.outputs, second.outputs)
    return Program(graph, first.mesh, first.rank, inputs, results)
