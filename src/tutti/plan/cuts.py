"""Where a step is cut into stages: at the borders of layers, so that the slowest stage is as fast as can be.

Layers are modules whose path ends in a number; what stands beside them (an embedding, a head) is a layer of its own. In
the order in which the forward pass runs, with t(i, j) the seconds of the layers i to j-1 for a microbatch and M_k(i, j)
the bytes by which they exceed, as stage k with its microbatches in flight, what a device may hold,

    best[0][j] = T_0(0, j)        best[k][j] = min over i of max(best[k-1][i], T_k(i, j))

where T_k is the pair (M_k, t): what does not fit is worse than all that does. That is exact for stages of one mesh.

Layers that call each other in turns (a recurrent cell and its norm, the field of a differential equation) form one
stage: forward values only go to later stages, so no stage starts between a layer and an earlier one that reads it.
So do layers that read or write the same state that forward changes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from math import inf

from torch import fx

from tutti.ir.labels import layer_of
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE, StepGraph
from tutti.ops import source
from tutti.plan.sharding_problem import Cost
from tutti.plan.stages import Reads, alone


@dataclass(frozen=True)
class Layer:
    """Of a layer, or of several: seconds of a microbatch's forward pass, backward pass and gradients of single
    parameters, and of the update; bytes as in `Cost`."""

    forward: float = 0.0
    backward: float = 0.0
    rest: float = 0.0
    update: float = 0.0
    kept: float = 0.0
    held: float = 0.0

    def __add__(self, other: Layer) -> Layer:
        return Layer(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def seconds(self) -> float:
        """For a microbatch."""
        return self.forward + self.backward + self.rest


class Layers:
    """The layers of a step, in the order of the forward pass. What belongs to none is left out."""

    def __init__(self, step: StepGraph):
        self.reads = reads = Reads(step)
        paths = [layer_of(n.meta["path"]) for n in reads.calls if n.meta["phase"] == FORWARD]
        around = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}  # modules of layers
        self.members: dict[str, Counter[tuple[str, str]]]  # path -> (what of `Layer` its nodes are, label) -> how many
        self.members = {path: Counter() for path in paths if path and path not in around}
        of_one = alone(reads)
        for name, node in step.inputs.items():
            path = name.partition(":")[2]
            for layer in (layer_of(path), path.rpartition(".")[0]):
                if layer in self.members:
                    self.members[layer]["kept", node.meta["label"]] += 1
                    break
        self.borders: list[Counter[tuple[str, int]]] = [Counter() for _ in self.members]
        self.inside: set[int] = set()  # layers with which no stage starts: an earlier one reads them or a later one
        # For each layer what is made until its end and read behind it: (label, output) -> how many.
        paths, here = list(self.members), self._forward(reads)
        self._keep_together(here)
        for node in step.calls:
            path, phase = layer_of(node.meta["path"]), node.meta["phase"]
            path = paths[here[node]] if node in here and paths else path
            if path in self.members:
                kind = {FORWARD: "forward", UPDATE: "update", BACKWARD: "rest" if node in of_one else "backward"}[phase]
                self.members[path][kind, node.meta["label"]] += 1

    def _forward(self, reads: Reads) -> dict[fx.Node, int]:
        """The number of the layer of each forward node; what stands outside of all follows what it reads."""
        order = {path: i for i, path in enumerate(self.members)}
        found: dict[fx.Node, int] = {}
        reached: dict[fx.Node, int] = {}  # the layer up to which a value has come
        for node in reads.calls:
            if node.meta["phase"] != FORWARD:
                continue
            read = [x for x in reads.of(node) if x in found]
            last = max((found[x] for x in read), default=0)
            here = found[node] = reached[node] = order.get(layer_of(node.meta["path"]), last)
            for x in read:
                maker, index = source(x)
                self.inside.update(range(here + 1, found[x] + 1))
                for border in range(reached[x], here):
                    self.borders[border][maker.meta["label"], index] += 1
                reached[x] = max(reached[x], here)
        return found

    def _keep_together(self, here: Mapping[fx.Node, int]) -> None:
        """State that forward changes is read and written in one stage: statistics, a power iteration, a queue."""
        changed = self.reads.step.changed_by_forward
        layers: dict[fx.Node, set[int]] = {self.reads.step.inputs[name]: set() for name in changed}
        if layers:
            for node, layer in here.items():
                for x in self.reads.of(node):
                    if x in layers:
                        layers[x].add(layer)
        for name, made in changed.items():
            found = layers[self.reads.step.inputs[name]] | {here[x] for x in self.reads.behind[made] if x in here}
            self.inside.update(range(min(found, default=0) + 1, max(found, default=0) + 1))

    def __len__(self) -> int:
        return len(self.members)

    def of(self, costs: Mapping[str, Cost]) -> dict[str, Layer]:
        """Path -> what the layer costs. costs: of one node, by label."""
        found = {}
        for path, members in self.members.items():
            sums: dict[str, float] = defaultdict(float)
            for (kind, label), count in members.items():
                cost = costs.get(label, Cost())
                if kind != "kept":
                    sums[kind] += count * cost.seconds
                sums["held"] += count * cost.held
                sums["kept"] += count * cost.kept
            found[path] = Layer(**sums)
        return found


def split(layers: Sequence[Layer], stages: int, in_flight: Sequence[float] = (), memory: float = inf,
          inside: Collection[int] = ()) -> list[int]:  # fmt: skip
    """The first layer of each of so many stages, none of them empty, so that the slowest is as fast as can be.

    in_flight: microbatches that each stage holds. memory: bytes that it may hold; where no cut fits, the one that
    exceeds it least is taken. inside: layers with which no stage starts. Raises ValueError where these leave no cut.
    """
    sums, n = [Layer(), *accumulate(layers)], len(layers)
    times, kept, held = ([getattr(s, field) for s in sums] for field in ("seconds", "kept", "held"))

    def cost(stage: int, i: int, j: int) -> tuple[float, float]:
        microbatches = in_flight[stage] if in_flight else 0
        over = kept[j] - kept[i] + microbatches * (held[j] - held[i]) - memory
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
