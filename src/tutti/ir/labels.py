"""Labels: names shared by corresponding nodes of repeated layers.

A *layer* is a module whose path ends in a number (`model.layers.3`). Two layers of one container are of the same kind
if the nodes inside them are, in order, the same operators on the same shapes. The label of a node is its module path
with `*` for the number of such a layer, its phase (`again` for recomputation in the backward pass), its operator and an
ordinal. In a container with layers of several kinds, the numbers of a kind replace `*`: `h.0` and `h.1-11`, `net.2,4`.
Layers that consist of modules are also recognised inside of layers (`down.2.attentions.0.blocks.*.norm`). Copies of a
batch (`lower.variants.unroll`) share labels too. Analysis and plans refer to labels, so their size does not grow with
depth.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import fx

from tutti.ir.kind import split_name
from tutti.ir.step_graph import StepGraph

_NUMBERS = re.compile(r"\*|\d+(-\d+)?(,\d+(-\d+)?)*")  # what stands for the number of a layer


def annotate_labels(step: StepGraph) -> None:
    """Set meta["label"] of every node, and meta["name"] of every call: the label with the layer's number for `*`."""
    rename = _layer_names(step.graph)
    for name, node in step.inputs.items():
        kind, path = split_name(name)
        if kind not in ("batch", "common", "lr"):  # these are not module paths
            path = _renamed(path, rename)
        node.meta["label"] = f"{kind}:{path}" if path else kind
    ordinals: dict[tuple, int] = defaultdict(int)
    alike: dict[tuple, dict[str, int]] = defaultdict(dict)
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        path = node.meta["path"]
        operation = f"{_phase(node)}/{_named(node)}"
        copy = node.meta.get("copy", 0)
        ordinal = ordinals[path, operation, copy]
        ordinals[path, operation, copy] += 1
        between = ">" if "of" in node.meta else "."  # `>` marks an operator that stands for one of the whole batch
        operation += f"{between}{ordinal}" if ordinal else ""
        if "of" in node.meta:  # work that one copy does for all is unlike that of the others
            kinds = alike[_renamed(path, rename), operation]
            kind = repr((str(node.target), [x.meta["val"] for x in (node, *node.all_input_nodes)]))
            number = kinds.setdefault(kind, len(kinds))
            operation += f"#{number}" if number else ""
        node.meta["label"] = f"{_renamed(path, rename)}/{operation}"
        node.meta["name"] = f"{path}/{operation}" + (f"@{copy}" if copy else "")


def _renamed(path: str, rename: dict[str, str]) -> str:
    """The path with the names of kinds for the numbers of layers."""
    parts = path.split(".")
    return ".".join(rename.get(".".join(parts[: i + 1]), x) if x.isdigit() else x for i, x in enumerate(parts))


def _layers(path: str) -> list[tuple[str, str]]:
    """The layers that contain a module, the outermost first, and its path in each."""
    parts = path.split(".")
    return [(".".join(parts[: i + 1]), ".".join(parts[i + 1 :])) for i, x in enumerate(parts) if x.isdigit()]


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


def in_layer(label: str) -> bool:
    """Return whether the path of a label is inside a layer, or a kind of layers."""
    return any(_NUMBERS.fullmatch(part) for part in label.split("."))


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
    """Return the names of layers in labels: `*` as number if all layers of a container are of one kind, else `1-11`.

    A layer inside of another counts only if it consists of modules: a sequence of plain operators would fold into one.
    """
    signatures: dict[str, list] = defaultdict(list)
    folds: set[str] = set()
    for node in graph.nodes:
        layers = _layers(node.meta["path"]) if node.op == "call_function" else ()
        if layers:
            random = node.target is torch.ops.tutti.uniform.default  # salts differ between layers
            constants = "" if random else repr(fx.map_arg((node.args, node.kwargs), lambda n: None))
            specs = [n.meta["val"] for n in (*node.all_input_nodes, node)]
            kind = hash(repr((_phase(node), str(node.target), specs, constants)))
            for i, (layer, rest) in enumerate(layers):
                signatures[layer].append((rest, kind))
                if rest or not i:
                    folds.add(layer)
    containers: dict[str, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
    for layer in signatures:
        container, _, number = layer.rpartition(".")
        containers[container][tuple(signatures[layer])].append(int(number))
    names = {}
    for container, kinds in containers.items():
        for numbers in kinds.values():
            shown = _ranges(numbers) if len(kinds) > 1 else "*"
            names |= {layer: shown for n in numbers if (layer := _join(container, str(n))) in folds}
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
    """Return whether a label's path matches a name: `h.1-11.weight` and `h.*.weight` match `h.3.weight`."""
    parts, named = label.split("."), name.split(".")
    return len(parts) == len(named) and all(
        part == n or (n.isdigit() and _holds(part, int(n))) for part, n in zip(parts, named, strict=True)
    )


def _holds(part: str, number: int) -> bool:
    if not _NUMBERS.fullmatch(part):
        return False
    runs = [run.split("-") for run in part.split(",")]
    return part == "*" or any(int(run[0]) <= number <= int(run[-1]) for run in runs)
