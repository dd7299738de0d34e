"""Sums of gradients in float32, where gradients are of lower precision.

Each microbatch makes gradients in the dtype of the parameters; the runtime adds them in float32. An update that casts
a gradient to float32, or takes it in any dtype (`tutti.adam`), reads the sum itself. For another update the sum is
rounded once to the dtype of the gradient.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

import tutti.nn.adam  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call, Spec
from tutti.lower.cut import Cut

WIDE = torch.float32
ADAM = {torch.ops.tutti.adam.default, torch.ops.tutti.adam_amsgrad.default}


def add_in_float32(cut: Cut) -> None:
    """Make the updates of a cut step read float32 sums, where they can. In place."""
    places: dict[str, list[Call]] = defaultdict(list)
    for part in cut.parts.values():
        for name, node in part.inputs.items():
            if name.startswith("grad:"):
                places[name].append(node)
    for name in cut.step.gradient_names:
        dtype, nodes = cut.step.outputs[name].meta["val"].dtype, places[name]
        if dtype.is_floating_point and dtype.itemsize < WIDE.itemsize:
            cut.wide_sums[name] = all(_takes_any(user, node) for node in nodes for user in node.users)
            for node in nodes if cut.wide_sums[name] else ():
                node.meta = {**node.meta, "val": Spec(node.meta["val"].shape, WIDE)}


def _takes_any(reader: Call, gradient: fx.Node) -> bool:
    casts = reader.target is torch.ops.aten._to_copy.default and reader.kwargs.get("dtype") == WIDE
    return casts or (reader.target in ADAM and [x for x in reader.all_input_nodes if x is gradient] == [gradient])
