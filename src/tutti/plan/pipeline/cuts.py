"""Cuts of a step into stages, at the borders of layers, that minimize the time of the slowest stage.

A layer is a module whose path ends in a number. Modules beside them (an embedding, a head) are layers of their own.
Layers are numbered in the order of the forward pass. Let t(i, j) be the seconds of the layers i to j-1 for a
microbatch, and M_k(i, j) the bytes by which they, as stage k with its microbatches in flight, exceed a device's memory:

    best[0][j] = T_0(0, j)        best[k][j] = min over i of max(best[k-1][i], T_k(i, j))

where T_k is the pair (M_k, t), so a stage that does not fit is worse than any that does. This is exact if all stages
use the same mesh.

Layers that call each other alternately (a recurrent cell and its norm, the field of a differential equation) form one
stage: forward values are sent only to later stages, so no stage starts between a layer and an earlier one that reads
it. Layers that read or write the same state that the forward pass changes also form one stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from math import inf

from torch import fx

from tutti.ir.costs import flat
from tutti.ir.kind import path_of
from tutti.ir.labels import layer_of
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE, StepGraph
from tutti.ops import source
from tutti.plan.network.sharding_problem import Cost
from tutti.plan.pipeline.function_stages import function_stages
from tutti.plan.pipeline.reads import Reads
from tutti.plan.pipeline.stages import alone


@dataclass(frozen=True)
class Layer:
    """Totals of one or more layers.

    forward, backward: seconds per microbatch.
    rest: seconds per microbatch of backward nodes that only one parameter's gradient needs.
    update: seconds per step.
    stored, activations: bytes, as in `Cost`.
    """

    forward: float = 0.0
    backward: float = 0.0
    rest: float = 0.0
    update: float = 0.0
    stored: float = 0.0
    activations: float = 0.0

    def __add__(self, other: Layer) -> Layer:
        return Layer(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def seconds(self) -> float:
        """Seconds per microbatch."""
        return self.forward + self.backward + self.rest


class Layers:
    """The layers of a step, in the order of the forward pass. Nodes outside of all layers are omitted."""

    def __init__(self, step: StepGraph):
        self.reads = reads = Reads(step)
        paths = [layer_of(n.meta["path"]) for n in reads.calls if n.meta["phase"] == FORWARD]
        around = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}  # modules of layers
        self.members: dict[str, Counter[tuple[str, str]]]  # path -> (field of `Layer`, label) -> number of nodes
        self.members = {path: Counter() for path in paths if path and path not in around}
        of_one = alone(reads)
        for name, node in step.inputs.items():
            if layer := self.layer(name):
                self.members[layer]["stored", node.meta["label"]] += 1
        self.borders: list[Counter[tuple[str, int]]] = [Counter() for _ in self.members]
        self.inside: set[int] = set()  # layers at which no stage may start
        # For each layer the values that are made before its end and read after it: (label, output) -> count.
        paths, here = list(self.members), self._forward(reads)
        if step.repeats:
            self._keep_together(here)
        for node in step.calls:
            path, phase = layer_of(node.meta["path"]), node.meta["phase"]
            path = paths[here[node]] if node in here and paths else path
            if path in self.members:
                kind = {FORWARD: "forward", UPDATE: "update", BACKWARD: "rest" if node in of_one else "backward"}[phase]
                self.members[path][kind, node.meta["label"]] += 1

    def layer(self, name: str) -> str | None:
        """The layer that an input belongs to, by its name."""
        path = path_of(name)
        return next((x for x in (layer_of(path), path.rpartition(".")[0]) if x in self.members), None)

    def around(self, homes: Mapping[str, int], costs: Mapping[str, Cost], stages: int) -> dict[str, int]:
        """The stages of layers whose inputs may have homes already, by path.

        Objects without homes are cut like a model of their own. Layers without inputs follow those before them. Without
        any layer, the first node has the stage that it finds itself, and the others follow it or what they read.
        """
        if not self.members:
            first = self.reads.calls[0]
            return {first.meta["name"]: function_stages(self.reads, {}, homes)[first]}
        stages_of_layers: dict[str, int] = {}
        for name, stage in homes.items():
            if layer := self.layer(name):
                stages_of_layers[layer] = min(stage, stages_of_layers.get(layer, stage))
        placed = {path.partition(".")[0] for path in stages_of_layers}
        free = {path: x for path, x in self.of(costs).items() if path.partition(".")[0] not in placed}
        if len(free) >= stages:
            starts = split(list(free.values()), stages)
            stages_of_layers |= {path: sum(start <= i for start in starts) - 1 for i, path in enumerate(free)}
        at = next((stages_of_layers[path] for path in self.members if path in stages_of_layers), 0)
        return {path: (at := stages_of_layers.get(path, at)) for path in self.members}

    def _forward(self, reads: Reads) -> dict[fx.Node, int]:
        """The layer number of each forward node. Nodes outside of all layers follow their operands."""
        order = {path: i for i, path in enumerate(self.members)}
        layers: dict[fx.Node, int] = {}
        reached: dict[fx.Node, int] = {}  # the last layer that a value was sent to
        for node in reads.calls:
            if node.meta["phase"] != FORWARD:
                continue
            read = [x for x in reads.of(node) if x in layers]
            last = self._behind(reads.of(node), layers, order)
            here = layers[node] = reached[node] = order.get(layer_of(node.meta["path"]), last)
            for x in read:
                maker, index = source(x)
                if reads.step.repeats:  # values of a function cross stages in either direction
                    self.inside.update(range(here + 1, layers[x] + 1))
                for border in range(reached[x], here):
                    self.borders[border][maker.meta["label"], index] += 1
                reached[x] = max(reached[x], here)
        return layers

    def _behind(self, read: Sequence[fx.Node], layers: Mapping[fx.Node, int], order: Mapping[str, int]) -> int:
        """The layer of a node outside of all layers: the last of its operands; in a function, which may read gradients,
        that of its largest operand."""
        if self.reads.step.repeats:
            return max((layers[x] for x in read if x in layers), default=0)
        operand_layers = {
            x: layers.get(x, order.get(layer_of(x.meta["path"]))) for x in read if x.op == "call_function"
        }
        sizes = (
            (sum(spec.bytes for spec in flat(x.meta["val"])), i) for x, i in operand_layers.items() if i is not None
        )
        return max(sizes, default=(0, 0))[1]

    def _keep_together(self, here: Mapping[fx.Node, int]) -> None:
        """Keep layers in one stage that share state which the forward pass changes: statistics, a queue, ..."""
        changed = self.reads.step.changed_by_forward
        layers: dict[fx.Node, set[int]] = {self.reads.step.inputs[name]: set() for name in changed}
        if layers:
            for node, layer in here.items():
                for x in self.reads.of(node):
                    if x in layers:
                        layers[x].add(layer)
        for name, successor in changed.items():
            sharing = layers[self.reads.step.inputs[name]] | {
                here[x] for x in self.reads.behind[successor] if x in here
            }
            self.inside.update(range(min(sharing, default=0) + 1, max(sharing, default=0) + 1))

    def __len__(self) -> int:
        return len(self.members)

    def unequal(self, stages: Mapping[str, int]) -> float:
        """The share of the layers' nodes that is in stages unlike any other. stages: the stage of each layer, by path.
        Equal stages are lowered and simulated once."""
        kinds: dict[int, list[frozenset]] = defaultdict(list)  # of the layers of each stage
        nodes: Counter[int] = Counter()
        for path, members in self.members.items():
            kinds[stages.get(path, 0)].append(frozenset(members.items()))
            nodes[stages.get(path, 0)] += members.total()
        unlike = {tuple(kind): nodes[stage] for stage, kind in kinds.items()}
        return sum(unlike.values()) / nodes.total() if nodes else 1.0

    def of(self, costs: Mapping[str, Cost]) -> dict[str, Layer]:
        """Path -> totals of the layer. costs: cost of one node, by label."""
        totals = {}
        for path, members in self.members.items():
            sums: dict[str, float] = defaultdict(float)
            for (kind, label), count in members.items():
                cost = costs.get(label, Cost())
                if kind != "stored":
                    sums[kind] += count * cost.seconds
                sums["activations"] += count * cost.activations
                sums["stored"] += count * cost.stored
            totals[path] = Layer(**sums)
        return totals


def split(layers: Sequence[Layer], stages: int, in_flight: Sequence[float] = (), memory: float = inf,
          inside: Collection[int] = ()) -> list[int]:  # fmt: skip
    """The first layer of each of `stages` non-empty stages such that the slowest stage is as fast as possible.

    in_flight: microbatches in flight of each stage.
    memory: bytes that a stage may keep. If no cut fits, the cut that exceeds it least is used.
    inside: layers at which no stage may start.

    Raises ValueError if these leave no cut.
    """
    sums, n = [Layer(), *accumulate(layers)], len(layers)
    times, stored, activations = ([getattr(s, field) for s in sums] for field in ("seconds", "stored", "activations"))

    def cost(stage: int, i: int, j: int) -> tuple[float, float]:
        microbatches = in_flight[stage] if in_flight else 0
        over = stored[j] - stored[i] + microbatches * (activations[j] - activations[i]) - memory
        return max(0.0, over), times[j] - times[i]

    best = [{j: (cost(0, 0, j), 0) for j in range(1, n + 1)}]
    for k in range(1, stages):
        before = {i: worst for i, (worst, _) in best[-1].items() if i not in inside}
        ways = {
            j: [(max(before[i], cost(k, i, j)), i) for i in range(k, j) if i in before] for j in range(k + 1, n + 1)
        }
        best.append({j: min(way) for j, way in ways.items() if way})
    if n not in best[-1]:
        raise ValueError(
            f"a model of {n} layers cannot be cut into {stages} stages: they call each other in turns, or "
            "share state that forward changes"
        )
    starts, j = [], n
    for k in reversed(range(stages)):
        j = best[k][j][1]
        starts.insert(0, j)
    return starts


def together(layers: Sequence[Layer], starts: Sequence[int]) -> list[Layer]:
    """Each stage as one layer."""
    return [sum(layers[a:b], Layer()) for a, b in pairwise([*starts, len(layers)])]
