"""Sums of gradients over microbatches.

A part that makes gradients adds each to its sum as soon as it is made, in place, so that a microbatch never holds the
gradients of all parameters. The sums are inputs and outputs of the part.

Sums may be in float32 where gradients are of lower precision. An update that casts a gradient to float32, or takes it
in any dtype (`tutti.adam`), reads the sum itself. For another update the sum is rounded once to the dtype of the
gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

import torch
from torch import fx

import tutti.nn.adam  # noqa: F401  (registers the operators)
from tutti.ir.kind import Kind, kind_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import UPDATE, Call
from tutti.lower.memory.inplace import written
from tutti.lower.parts.cut import Cut
from tutti.lower.program import Program

WIDE = torch.float32
ADAM = {torch.ops.tutti.adam.default, torch.ops.tutti.adam_amsgrad.default}


def add_in_float32(cut: Cut) -> None:
    """Make the updates of a cut step read float32 sums, where they can. In place."""
    places: dict[str, list[Call]] = defaultdict(list)
    for part in cut.parts.values():
        for name, node in part.inputs.items():
            if kind_of(name) == Kind.GRAD:
                places[name].append(node)
    for name in cut.step.gradient_names:
        dtype, nodes = cut.step.outputs[name].meta["val"].dtype, places[name]
        if dtype.is_floating_point and dtype.itemsize < WIDE.itemsize:
            cut.wide_sums[name] = all(_takes_any(user, node) for node in nodes for user in node.users)
            for node in nodes if cut.wide_sums[name] else ():
                node.meta = {**node.meta, "val": Spec(node.meta["val"].shape, WIDE)}


def add_to_sums(program: Program, wide: Container[str]) -> Program:
    """Make a Program add the gradients that it returns to inputs of the same names, in place.

    wide: names of the gradients that are added in float32.
    """
    graph, output = program.graph, program.graph.output_node()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results: list[Call] = list(output.args[0])  # pyright: ignore[reportArgumentType]
    for i, name in enumerate(output.meta["names"]):
        if kind_of(name) != Kind.GRAD:
            continue
        gradient, (layout, whole) = results[i], program.outputs[name]
        dtype = WIDE if name in wide else whole.dtype
        spec = Spec(gradient.meta["val"].shape, dtype)
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
            total = graph.placeholder(f"sum_{i}")
        with graph.inserting_before(output):
            add = graph.call_function(torch.ops.aten.add_.Tensor, (total, gradient))
            results[i] = graph.call_function(written, (add, total))
        total.meta = {"val": spec, "input": name, "label": name, "phase": UPDATE, "flops": 0, "bytes": 0}
        add.meta = {
            "val": spec,
            "label": gradient.meta["label"],
            "phase": UPDATE,
            "path": gradient.meta.get("path", ""),
        }
        results[i].meta = dict(add.meta)
        inputs.append(total)
        program.inputs[name] = program.outputs[name] = (layout, Spec(whole.shape, dtype))
    output.args = (tuple(results),)
    return program


def _takes_any(reader: Call, gradient: fx.Node) -> bool:
    casts = reader.target is torch.ops.aten._to_copy.default and reader.kwargs.get("dtype") == WIDE
    return casts or (reader.target in ADAM and [x for x in reader.all_input_nodes if x is gradient] == [gradient])
