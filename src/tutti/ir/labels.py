"""Labels: names shared by corresponding nodes of repeated layers.

A *layer* is a module whose path ends in a number (`model.layers.3`). Two layers of one container are of the same kind
if the nodes inside them are, in order, the same operators on the same shapes. The label of a node is its module path
with `*` for the number of such a layer, its phase (`again` for recomputation in the backward pass), its operator and an
ordinal. In a container with layers of several kinds, the numbers of a kind replace `*`: `h.0` and `h.1-11`, `net.2,4`.
Copies of a batch (`lower.unroll`) share labels too. Analysis and plans refer to labels, so their size does not grow
with depth.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import fx

from tutti.ir.step_graph import StepGraph


def annotate_labels(step: StepGraph) -> None:
    """Set meta["label"] of every node, and meta["name"] of every call: the label with the layer's number for `*`."""
    rename = _layer_names(step.graph)
    for name, node in step.inputs.items():
        kind, _, path = name.partition(":")
        layer, rest = _split(path) if kind not in ("batch", "common", "lr") else ("", path)  # not module paths
        node.meta["label"] = f"{kind}:{_join(rename.get(layer, layer), rest)}" if path else kind
    ordinals: dict[tuple, int] = defaultdict(int)
    alike: dict[tuple, dict[str, int]] = defaultdict(dict)
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        layer, rest = _split(node.meta["path"])
        operation = f"{_phase(node)}/{_named(node)}"
        copy = node.meta.get("copy", 0)
        ordinal = ordinals[layer, rest, operation, copy]
        ordinals[layer, rest, operation, copy] += 1
        between = ">" if "of" in node.meta else "."  # `>` marks an operator that stands for one of the whole batch
        operation += f"{between}{ordinal}" if ordinal else ""
        if "of" in node.meta:  # work that one copy does for all is unlike that of the others
            known = alike[_join(rename.get(layer, layer), rest), operation]
            kind = repr((str(node.target), [x.meta["val"] for x in (node, *node.all_input_nodes)]))
            number = known.setdefault(kind, len(known))
            operation += f"#{number}" if number else ""
        node.meta["label"] = f"{_join(rename.get(layer, layer), rest)}/{operation}"
        node.meta["name"] = f"{_join(layer, rest)}/{operation}" + (f"@{copy}" if copy else "")


def _split(path: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up` -> (`model.layers.3`, `mlp.up`); a path outside of any layer -> ("", path)."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1]), ".".join(parts[i + 1 :])
    return "", path


def layer_of(path: str) -> str:
    """The layer of a module, or the module itself outside any layer."""
    layer, rest = _split(path)
    return layer or rest


def is_layer(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _join(layer: str, rest: str) -> str:
    return f"{layer}.{rest}" if layer and rest else layer or rest


def _phase(node: fx.Node) -> str:
    return "recompute" if "recompute" in node.meta else node.meta["phase"]


def _operator(node: fx.Node) -> str:
    name = getattr(node.target, "__name__", str(node.target))
    return str(node.target).removeprefix("aten.").removesuffix(".default") if "." in str(node.target) else name


def _named(node: fx.Node) -> str:
    """The operator. In a copy of the batch, also the operator that it stands for."""
    operator, of = _operator(node), node.meta.get("of")
    if of is None or of == operator:
        return operator
    return of if re.fullmatch(re.escape(operator) + r"\.\d+", of) else f"{of}>{operator}"


def _layer_names(graph: fx.Graph) -> dict[str, str]:
    """The name of each layer's kind: `h.*` if all layers of `h` are of one kind, else `h.0`, `h.1-11`, ..."""
    signatures: dict[str, list] = defaultdict(list)
    for node in graph.nodes:
        layer, rest = _split(node.meta["path"])
        if layer and node.op == "call_function":
            random = node.target is torch.ops.tutti.uniform.default  # salts differ between layers
            constants = "" if random else repr(fx.map_arg((node.args, node.kwargs), lambda n: None))
            specs = [n.meta["val"] for n in (*node.all_input_nodes, node)]
            signatures[layer].append((rest, _phase(node), str(node.target), specs, constants))
    containers: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for layer, signature in signatures.items():
        container, _, number = layer.rpartition(".")
        containers[container][repr(signature)].append(int(number))
    names = {}
    for container, kinds in containers.items():
        for numbers in kinds.values():
            shown = _ranges(numbers) if len(kinds) > 1 else "*"
            names |= {_join(container, str(n)): _join(container, shown) for n in numbers}
    return names


def _ranges(numbers: list[int]) -> str:
    """`[4, 1, 2, 0]` as `0-2,4`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def covers(label: str, name: str) -> bool:
    """Whether a label's path matches a module or parameter: `h.1-11.weight` and `h.*.weight` match `h.3.weight`."""
    parts, named = label.split("."), name.split(".")
    return len(parts) == len(named) and all(
        part == n or (n.isdigit() and _holds(part, int(n))) for part, n in zip(parts, named, strict=True)
    )


def _holds(part: str, number: int) -> bool:
    if not re.fullmatch(r"\*|\d+(-\d+)?(,\d+(-\d+)?)*", part):
        return False
    runs = [run.split("-") for run in part.split(",")]
    return part == "*" or any(int(run[0]) <= number <= int(run[-1]) for run in runs)
