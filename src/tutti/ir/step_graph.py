"""StepGraph: a whole training step as one functional graph of ATen operators.

Inputs and outputs have names of the form `kind:path` (`ir.kind`):

| kind | input | output |
|---|---|---|
| `param`, `buffer` | the model's tensors, under the model's own names | their successors |
| `exp_avg`, `momentum_buffer`, `master`, ... | optimizer state of a parameter | its successor |
| `batch` | entries of the batch that have its rows in dim 0, by name (`tracing.batch`) | |
| `common` | entries of the batch that all its rows share | |
| `lr` | learning rate of a parameter group, 0-d float64 | |
| `step`, `seed` | number of this update (1 for the first) and random seed, 0-d int64 | |
| `count` | number of this update for the parameters in `StepGraph.counts`, which had fewer before, 0-d int64 | |
| `constant` | small tensors that the model makes out of Python numbers | |
| `loss`, `grad` | | the loss, 0-d; the gradient of a parameter |
| `skipped` | | 1 where the update was left out, of a step that is guarded, 0-d |
| `grad_norm` | | the norm of all gradients before they are clipped, 0-d |
| `written` | | a parameter that the forward pass writes into, after that and before its update |
| `cache` | other tensors that functions write into (`tracing.holdings`) | their successors |
| `output` | | a leaf of what a function returns, by its position |
| `metric` | | what the model or the loss gives besides the loss, by name |
| `check` | | above 0 where a check of values in the model's Python code fails, 0-d float32 |

`ir.node_info.NodeInfo` describes what nodes carry in `meta`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tutti.ir import text
from tutti.ir.kind import Kind, kind_of, path_of
from tutti.ir.spec import Spec
from tutti.ir.values import Guards

Call = Any  # an fx.Node; its arguments are typed too loosely by fx

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
UPDATE_METRICS = ("skipped", "grad_norm")  # outputs of the update that are not state
GUARD = "finite"  # the path of nodes that check for non-finite values


@dataclass(repr=False)
class StepGraph:
    """One training step (or a part of it) as a functional graph. See the module's docstring for the names.

    `print(graph)` lists inputs, operators by phase, and outputs.
    """

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    matches: Counter[str] = field(default_factory=Counter)  # matches of each pattern at capture
    guards: Guards = field(default_factory=Guards)  # values of the batch that the graph depends on
    checks: dict[str, str] = field(default_factory=dict)  # failure message by output
    counts: dict[str, list[str]] = field(default_factory=dict)  # parameters by the input that counts their updates

    def __repr__(self) -> str:
        counts = f"{len(self.calls)} operators, {len(self.inputs)} inputs, {len(self.outputs)} outputs"
        return f"StepGraph({counts}, {self.flops:.3g} FLOP)"

    def __str__(self) -> str:
        written = [repr(self), "inputs"]
        written += text.columns(
            (f"%{node.name}", text.described(node.meta["val"]), name) for name, node in self.inputs.items()
        )
        for phase in (FORWARD, BACKWARD, UPDATE):
            if calls := [node for node in self.calls if node.meta["phase"] == phase]:
                written += [phase, *text.lines(calls, {})]
        return "\n".join([*written, "outputs", *text.columns((f"%{x.name}", name) for name, x in self.outputs.items())])

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @property
    def calls(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def spec(self, name: str) -> Spec:
        return self.inputs[name].meta["val"]

    def names(self, kind: str) -> list[str]:
        """The paths of all inputs of a kind."""
        return [path_of(name) for name in self.inputs if kind_of(name) == kind]

    @property
    def state_names(self) -> list[str]:
        """Inputs that a step replaces: parameters, buffers and optimizer state."""
        return [n for n in self.inputs if n in self.outputs]

    @property
    def changed_by_forward(self) -> dict[str, fx.Node]:
        """The successors of inputs that the forward pass replaces: buffers, and parameters that it writes into."""
        changed = {n: x for n, x in self.outputs.items() if n in self.inputs and x.meta["phase"] != UPDATE}
        written = {path_of(n): x for n, x in self.outputs.items() if kind_of(n) == Kind.WRITTEN}
        return changed | {Kind.PARAM.at(path): x for path, x in written.items()}

    @property
    def repeats(self) -> bool:
        """Whether the graph runs for every microbatch, as a training step or evaluation; a function runs it once."""
        return "loss" in self.outputs or bool(self.gradient_names)

    @property
    def sequence_chunks(self) -> int:
        """The number of chunks of the sequence. See `lower.variants.unroll`."""
        return 1 + max((n.meta.get("slice", 0) for n in self.graph.nodes), default=0)

    @property
    def batch_splits(self) -> int:
        """The number of copies of the batch. See `lower.variants.unroll`."""
        return 1 + max((n.meta.get("copy", 0) for n in self.graph.nodes), default=0)

    @property
    def flops(self) -> int:
        """Floating-point operations, without recomputation."""
        return sum(n.meta["flops"] for n in self.calls if "recompute" not in n.meta)

    def keep(self, names: list[str]) -> StepGraph:
        """The part of the graph that computes only the named outputs. Inputs stay, used or not."""
        copy, mapping = copy_graph(self.graph)
        outputs = {name: mapping[self.outputs[name]] for name in names}
        copy.output(tuple(outputs.values()))
        copy.eliminate_dead_code()
        inputs = {name: mapping[node] for name, node in self.inputs.items()}
        return StepGraph(copy, inputs, outputs, self.constants, self.device, checks=self.checks, counts=self.counts)

    def gradient_label(self, name: str) -> str:
        """The label of a parameter's gradient, as an input of the update."""
        return Kind.GRAD.at(path_of(self.inputs[Kind.PARAM.at(name)].meta["label"]))

    def name_inputs_as(self, other: StepGraph) -> None:
        """Give inputs the labels of another graph of the model, whose layers may be grouped differently, so that its
        plan applies to them."""
        for name, node in self.inputs.items():
            if name in other.inputs:
                node.meta["label"] = other.inputs[name].meta["label"]

    @property
    def gradient_names(self) -> list[str]:
        return [name for name in self.outputs if kind_of(name) == Kind.GRAD]

    @property
    def observed_names(self) -> list[str]:
        """Metrics and checks."""
        return [name for name in self.outputs if kind_of(name) in (Kind.CHECK, Kind.METRIC)]

    @property
    def updated(self) -> list[str]:
        """Parameters that the optimizer updates."""
        params = ((path_of(n), x) for n, x in self.outputs.items() if kind_of(n) == Kind.PARAM)
        return [name for name, x in params if x.meta["phase"] == UPDATE]

    def without_gradients(self) -> StepGraph:
        """The step without gradients as outputs, and without parameters between the forward pass and their update."""
        return self.keep([name for name in self.outputs if kind_of(name) not in (Kind.GRAD, Kind.WRITTEN)])

    def at_gradients(self) -> tuple[StepGraph, StepGraph]:
        """The step cut in two: loss, gradients and state after a microbatch; the update from given gradients."""
        updated = [name for name, node in self.outputs.items() if node.meta["phase"] == UPDATE]
        before = self.keep([name for name, node in self.outputs.items() if node.meta["phase"] != UPDATE])
        for name in [name for name in before.outputs if kind_of(name) == Kind.WRITTEN]:
            before.outputs[Kind.PARAM.at(path_of(name))] = before.outputs.pop(name)
        (output,) = before.graph.find_nodes(op="output")
        output.args = (tuple(before.outputs.values()),)
        after, mapping = fx.Graph(), {}
        for node in self.inputs.values():
            mapping[node] = after.node_copy(node)
        inputs = {name: mapping[node] for name, node in self.inputs.items()}
        for name in self.gradient_names:
            node = self.outputs[name]
            inputs[name] = mapping[node] = after.placeholder(node.name)
            label = self.gradient_label(path_of(name))
            mapping[node].meta = {**node.meta, "label": label, "phase": UPDATE, "flops": 0, "bytes": 0}
        for name, node in self.changed_by_forward.items():  # the update reads the input after the forward pass
            mapping.setdefault(node, mapping[self.inputs[name]])
        for node in self.calls:
            if node.meta["phase"] == UPDATE:
                mapping[node] = after.node_copy(node, mapping.__getitem__)
        outputs = {name: mapping[self.outputs[name]] for name in updated}
        after.output(tuple(outputs.values()))
        return before, StepGraph(after, inputs, outputs, self.constants, self.device, counts=self.counts)

    @property
    def fingerprint(self) -> str:
        """A hash of operators, shapes and structure. A plan fits each graph with the same fingerprint."""
        digest = hashlib.sha256()
        for node in self.graph.nodes:
            parts = (node.op, str(node.target), node.meta.get("label"), repr(node.meta.get("val")))
            digest.update(repr((parts, node.args, node.kwargs)).encode())
        return digest.hexdigest()[:16]


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy without its output node, and the mapping from old to new nodes."""
    copy, mapping = fx.Graph(), {}
    for node in graph.nodes:
        if node.op != "output":
            mapping[node] = copy.node_copy(node, mapping.__getitem__)
    return copy, mapping


def replace_uses(others: Mapping[fx.Node, fx.Node]) -> None:
    """Replace nodes by others in all readers. Each reader is rewritten once: readers of thousands of nodes, such as
    updates, would take quadratic time one node at a time."""
    for reader in dict.fromkeys(reader for node in others for reader in node.users):
        reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), lambda n: others.get(n, n))  # pyright: ignore


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the transitive inputs of nodes, including the nodes themselves; calls only."""
    calls: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in calls and node.op == "call_function":
            calls.add(node)
            todo += node.all_input_nodes
    return calls
