"""A captured step as JSON, to plan with it later without its model.

Guards of the batch are left out: a step that is read is planned with and simulated, not run on batches.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from tutti.ir.portable import NotPortable, packed, unpacked
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph

MAX_CONSTANT = 65_536  # elements of a constant
PLAIN = (str, int, bool, type(None))


def to_json(step: StepGraph) -> str:
    """The step as a line of JSON. Raises NotPortable for nodes, arguments or constants that JSON cannot express, such
    as loops."""
    number = {node: i for i, node in enumerate(step.graph.nodes)}
    return json.dumps({
        "nodes": packed(step.graph),
        "info": [_info(node) for node in step.graph.nodes],
        "inputs": {name: number[node] for name, node in step.inputs.items()},
        "outputs": {name: number[node] for name, node in step.outputs.items()},
        "constants": {name: _constant(x) for name, x in step.constants.items()},
        "device": str(step.device), "matches": step.matches, "checks": step.checks, "counts": step.counts,
    })  # fmt: skip


def from_json(text: str) -> StepGraph:
    """The inverse of `to_json`. Runs no code that the text names. Raises ValueError for any other text."""
    try:
        data = json.loads(text)
        graph = unpacked(data["nodes"])
        nodes = list(graph.nodes)
        for node, info in zip(nodes, data["info"], strict=True):
            if node.op == "call_function" and not _is_operator(node.target):
                raise NotPortable(f"a call of {node.target}")
            node.meta = {**info, "val": _read_val(info["val"])} if info else {}
        return StepGraph(
            graph, {name: nodes[i] for name, i in data["inputs"].items()},
            {name: nodes[i] for name, i in data["outputs"].items()},
            {name: _read_constant(x) for name, x in data["constants"].items()}, torch.device(data["device"]),
            Counter(data["matches"]), checks=data["checks"], counts=data["counts"],
        )  # fmt: skip
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not a captured step: {type(error).__name__}: {error}") from error


def _is_operator(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) or target is operator.getitem


def _info(node: fx.Node) -> dict[str, Any]:
    if node.op == "output":
        return {}
    info = {key: x for key, x in node.meta.items() if key != "val"}
    for key, x in info.items():
        if not isinstance(x, PLAIN):
            raise NotPortable(f"{key} of type {type(x).__name__}")
    return {**info, "val": _val(node.meta["val"])}


def _val(val: Any) -> Any:
    """A Spec as [dtype, sizes], several of them as {"each": [...]}."""
    if isinstance(val, Spec):
        return [str(val.dtype).removeprefix("torch."), list(val.shape)]
    return None if val is None else {"each": [_val(x) for x in val]}


def _read_val(val: Any) -> Any:
    if val is None:
        return None
    if isinstance(val, dict):
        return tuple(_read_val(x) for x in val["each"])
    dtype, shape = val
    return Spec(tuple(int(n) for n in shape), _dtype(dtype))


def _constant(x: torch.Tensor) -> list[Any]:
    if x.numel() > MAX_CONSTANT or x.layout is not torch.strided:
        raise NotPortable(f"a constant of {x.numel()} elements")
    return [str(x.dtype).removeprefix("torch."), list(x.shape), x.flatten().tolist()]


def _read_constant(x: Any) -> torch.Tensor:
    dtype, shape, values = x
    return torch.tensor(values, dtype=_dtype(dtype)).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    if not isinstance(dtype := getattr(torch, name), torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
