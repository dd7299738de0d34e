"""Labels: names that corresponding nodes of repeated layers share.

A *layer* is a module whose path ends in a number (`model.layers.3`). Two layers of one container are of the same
kind when the nodes inside them, in order, are the same operators on the same shapes. The label of a node is its
module path with the number of such a layer replaced by `*`, its phase, its operator and an ordinal. Analysis and
plans speak of labels, so that their size does not grow with depth.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from tutti.graph.step_graph import StepGraph


def annotate_labels(step: StepGraph) -> None:
    """Write meta["label"] of every node."""
    rename = _layer_names(step.graph)
    for name, node in step.inputs.items():
        kind, _, path = name.partition(":")
        layer, rest = _split(path)
        node.meta["label"] = f"{kind}:{_join(rename.get(layer, layer), rest)}" if path else kind
    ordinals: dict[tuple, int] = defaultdict(int)
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        layer, rest = _split(node.meta["path"])
        operation = f"{node.meta['phase']}/{_operator(node)}"
        ordinal = ordinals[layer, rest, operation]
        ordinals[layer, rest, operation] += 1
        path = _join(rename.get(layer, layer), rest)
        node.meta["label"] = f"{path}/{operation}" + (f".{ordinal}" if ordinal else "")


def _split(path: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up` -> (`model.layers.3`, `mlp.up`); a path outside of any layer -> ("", path)."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1]), ".".join(parts[i + 1 :])
    return "", path


def _join(layer: str, rest: str) -> str:
    return f"{layer}.{rest}" if layer and rest else layer or rest


def _operator(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    return str(node.target).removeprefix("aten.").removesuffix(".default") if "." in str(node.target) else name


def _layer_names(graph: fx.Graph) -> dict[str, str]:
    """For each layer its name with the number starred: `h.*` for the commonest kind of `h`, `h.*1` for the next."""
    signatures: dict[str, list] = defaultdict(list)
    for node in graph.nodes:
        layer, rest = _split(node.meta["path"])
        if layer and node.op == "call_function":
            random = node.target is torch.ops.tutti.uniform.default  # its salt is its own
            constants = "" if random else repr(fx.map_arg((node.args, node.kwargs), lambda n: None))
            specs = [n.meta["val"] for n in (*node.all_input_nodes, node)]
            signatures[layer].append((rest, node.meta["phase"], str(node.target), specs, constants))
    containers: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for layer, signature in signatures.items():
        containers[layer.rpartition(".")[0]][repr(signature)].append(layer)
    names = {}
    for container, kinds in containers.items():
        for i, layers in enumerate(sorted(kinds.values(), key=len, reverse=True)):
            names |= {layer: f"{container}.*{i or ''}" for layer in layers}
    return names
