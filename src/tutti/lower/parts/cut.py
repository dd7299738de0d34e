"""Cut a step into the parts of a pipeline: one graph for each stage and kind of work.

| kind | runs | what it computes |
|---|---|---|
| `P` | once a step | what all microbatches share: the roundings of weights (`lower.parts.weight_roundings`) |
| `F` | for every microbatch | the forward pass of a stage |
| `B` | for every microbatch | its backward pass; if split, only what other stages or several gradients depend on |
| `W` | for every microbatch | if split, the rest of the backward pass: gradients of single parameters |
| `U0`, `U1`, ... | once a step | the update; values cross stages only from one number to the next |

A function has no microbatches. A call runs its parts once:

| kind | runs | what it computes |
|---|---|---|
| `C0`, `C1`, ... | once a call | everything; values cross stages only from one number to the next |

A plan without a pipeline has one stage, whose forward and backward passes are not divided:

| kind | runs | what it computes |
|---|---|---|
| `S` | once a step | everything |
| `P` | once a step | what all microbatches share |
| `M` | for every microbatch | gradients, where they are accumulated |
| `U` | once a step | the update from accumulated gradients |

If the sequence is cut into chunks, so are the forward and backward parts, and each of the latter computes its share of
the gradients. A value that one part reads from another is an input `value:<node>` of the one and an output of the
other. Each part recomputes views, and values that depend only on the batch and constants.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from tutti.ir.kind import CALL_INPUTS, Kind, kind_of, path_of
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE, StepGraph
from tutti.lower.parts.crossings import levels
from tutti.lower.parts.weight_roundings import divided, merged, weight_roundings
from tutti.plan.pipeline.reads import Reads
from tutti.plan.pipeline.stages import alone, stages_of

LEVELLED = ("U", "C")  # kinds of parts that are numbered by how often their values have crossed stages
PREPARATION = "P"
WITH_LAYERS = ("S", "M")  # kinds of parts that have the layers, without a pipeline
FLAT = {"S": "a step", "M": "a microbatch", "U": "the update"}  # kinds of parts of a plan without a pipeline


class Place(NamedTuple):
    """A part: its stage, its kind and its chunk of the sequence."""

    stage: int
    kind: str
    slice: int = 0

    @property
    def once(self) -> bool:
        """Whether it runs once in a step or call, not for every microbatch."""
        return self.kind[0] in ("S", PREPARATION, *LEVELLED)

    def __str__(self) -> str:
        if self.kind in FLAT:
            return FLAT[self.kind]
        if self.kind == PREPARATION:
            return f"the preparation of stage {self.stage}"
        return f"stage {self.stage} {self.kind}" + (f" of chunk {self.slice}" if self.slice else "")


@dataclass
class Cut:
    """The parts of a step, and the values passed between them.

    parts: in an executable order. homes: the stage that owns each stored input. makers, readers: the parts that make
    and read each value and gradient. borrowers: for each input, the other stages that read it. wide_sums: for each
    gradient that is added in float32 although it has less precision, whether the update reads the float32 sum.
    """

    step: StepGraph
    parts: dict[Place, StepGraph]
    homes: dict[str, int]
    makers: dict[str, Place] = field(default_factory=dict)
    readers: dict[str, list[Place]] = field(default_factory=dict)
    borrowers: dict[str, list[int]] = field(default_factory=dict)
    wide_sums: dict[str, bool] = field(default_factory=dict)


def cut(step: StepGraph, named: Mapping[str, int], split: bool = False, homes: Mapping[str, int] | None = None,
        once: bool = True) -> Cut:  # fmt: skip
    """Cut a step into parts.

    named: stages by the names of modules and forward nodes (`plan.pipeline.stages.stages_of`). split: whether the
    backward pass is split into `B` and `W`. homes: stages of inputs by name, if another graph of the model has placed
    them already.
    once: whether work that microbatches share is a separate part (`lower.parts.weight_roundings`).
    """
    once = once and step.repeats
    reads = Reads(merged(step) if once else step, homes or ())
    return _Cutter(reads, stages_of(reads, named, homes), split, once).cut()


def undivided(step: StepGraph, count: int, once: bool = True) -> Cut:
    """Cut a step for a plan without a pipeline. count: number of microbatches. once: as for `cut`."""
    homes = {name: 0 for name in step.inputs if kind_of(name) not in CALL_INPUTS}
    updates = any(node.meta["phase"] == UPDATE for node in step.outputs.values())
    if not updates or count == 1:
        whole, part = Place(0, "S"), step.without_gradients() if updates else step
        return Cut(step, {whole: part}, homes, dict.fromkeys(part.outputs, whole))
    step = merged(step) if once else step
    before, after = step.at_gradients()
    shared, before = divided(before) if once else (None, before)
    microbatch, update = Place(0, "M"), Place(0, "U")
    makers = {name: microbatch for name in before.outputs} | {name: update for name in after.outputs}
    result = Cut(
        step, {microbatch: before, update: after}, homes, makers, {name: [update] for name in step.gradient_names}
    )
    if shared:
        preparation = Place(0, PREPARATION)
        result.parts = {preparation: shared, **result.parts}
        result.makers |= dict.fromkeys(shared.outputs, preparation)
        result.readers |= {name: [microbatch] for name in shared.outputs}
    return result


class _Cutter:
    def __init__(self, reads: Reads, stages: Mapping[fx.Node, int], split: bool, once: bool):
        self.reads, self.stages = reads, stages
        self.step = step = reads.step
        self.names = {node: name for name, node in step.inputs.items()}
        self.gradients: dict[fx.Node, str] = {}
        for name in step.gradient_names:
            self.gradients.setdefault(step.outputs[name], name)
        changed = step.changed_by_forward if step.repeats else {}
        self.written = {node: name for name, node in changed.items() if kind_of(name) == Kind.PARAM}
        self.alone = alone(reads, stages) if split else {}
        self.levels = levels(reads, stages)
        self.shared = set(weight_roundings(step) if once else ())
        self.places = {n: self.place(n) for n in reads.calls}
        self.shares = {name: self.shares_of(step.outputs[name]) for name in step.gradient_names}
        self.part_outputs: dict[Place, dict[str, fx.Node]] = defaultdict(dict)
        self.readers: dict[str, list[Place]] = defaultdict(list)

    def place(self, node: fx.Node) -> Place:
        if node.target is operator.getitem:
            return self.place(node.args[0])  # pyright: ignore[reportArgumentType]
        stage, phase, chunk = self.stages[node], node.meta["phase"], node.meta.get("slice", 0)
        if not self.step.repeats:
            return Place(stage, f"C{self.levels[node]}")
        if node in self.shared:
            return Place(stage, PREPARATION)
        if phase == FORWARD:
            return Place(stage, "F", chunk)
        if phase == BACKWARD:
            return Place(stage, "W" if node in self.alone else "B", chunk)
        return Place(stage, f"U{self.levels[node]}")

    def is_gradient(self, reader: fx.Node, x: fx.Node) -> bool:
        """Return whether an update node takes x as an accumulated gradient."""
        return reader.meta["phase"] == UPDATE and x in self.gradients

    def cut(self) -> Cut:
        members: dict[Place, list[fx.Node]] = defaultdict(list)
        summed = {x for _, sums in self.shares.values() for x in sums}
        for node, place in self.places.items():
            if node not in summed:
                members[place].append(node)
        for name, node in self.step.outputs.items():
            stored = Kind.PARAM.at(path_of(name)) if kind_of(name) == Kind.WRITTEN else name
            for share in self.shares[name][0] if name in self.shares else [node]:
                self.part_outputs[self.keeper(name, share)][stored] = share
        places = sorted(dict.fromkeys([*members, *self.part_outputs]), key=_order)  # on all ranks alike
        drafts = {place: _Draft(self, place, members[place]) for place in places}
        result = Cut(self.step, {}, {self.names[n]: s for n, s in self.stages.items() if n in self.names})
        for place, draft in drafts.items():
            result.parts[place] = draft.finish(self.part_outputs[place])
            result.makers |= {name: place for name in self.part_outputs[place]}
        result.readers = dict(self.readers)
        if not self.step.repeats:
            self.note_later_reads(result)
        for place, part in result.parts.items():
            for name in part.inputs:
                if name in result.homes and result.homes[name] != place.stage:
                    borrowers = result.borrowers.setdefault(name, [])
                    if place.stage not in borrowers:
                        borrowers.append(place.stage)
        return result

    def note_later_reads(self, cut: Cut) -> None:
        """Mark the inputs that parts must not write into: later parts read them, other stages receive them, or they are
        returned."""
        stages: dict[str, set[int]] = defaultdict(set)  # that have each value
        for place, part in cut.parts.items():
            for name in part.inputs:
                source = cut.homes.get(name, cut.makers[name].stage if name in cut.makers else place.stage)
                stages[name] |= {place.stage, source}
        returned, later = {x.name for x in self.step.outputs.values()}, set()
        for place, part in reversed(cut.parts.items()):
            for name, node in part.inputs.items():
                if (place.stage, name) in later or len(stages[name]) > 1 or node.name in returned:
                    node.meta["read_later"] = True
            later |= {(place.stage, name) for name in part.inputs}

    def shares_of(self, gradient: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
        """The summands of a gradient, one per chunk of the sequence, and the nodes that add them: the runtime adds them
        instead, like microbatches. The gradient itself if it is not such a sum within one stage."""
        shares, sums, todo = [], set(), [gradient]
        while todo:
            x = todo.pop()
            if x.meta.get("joins") and (x is gradient or all(user in sums for user in x.users)):
                sums.add(x)
                todo += [y for y in x.args if isinstance(y, fx.Node)]  # a value added to itself is there twice
            else:
                shares.append(x)
        owners = [self.owner(x) for x in shares]
        apart = len(set(owners)) == len(owners) and len({owner.stage for owner in owners}) == 1
        return (shares, sums) if apart else ([gradient], set())

    def owner(self, node: fx.Node) -> Place:
        """The part that makes a value, or the value of which it is a view."""
        first = "F" if self.step.repeats else "C0"
        behind = self.reads.behind[node]
        if not behind:
            return Place(0, first)
        return self.places[behind[0]] if behind[0] in self.places else Place(self.stages[behind[0]], first)

    def keeper(self, name: str, node: fx.Node) -> Place:
        """Return the part that returns an output: its owner. A function returns a stored tensor at its home."""
        owner, old = self.owner(node), self.step.inputs.get(name)
        home = owner.stage if old is None or self.step.repeats else self.stages.get(old, owner.stage)
        if home == owner.stage:
            return owner
        for x in self.reads.behind[node]:
            if x in self.places:
                self.part_outputs[self.places[x]][Kind.VALUE.at(x.name)] = x
        return Place(home, f"C{int(owner.kind[1:]) + 1}")


class _Draft:
    """A part under construction."""

    def __init__(self, cutter: _Cutter, place: Place, members: list[fx.Node]):
        self.cutter, self.place, self.members = cutter, place, members
        self.graph, self.copies, self.inputs = fx.Graph(), {}, {}
        for node in members:  # inputs first
            self.take(node)

    def take(self, node: fx.Node) -> None:
        """Add placeholders for the operands of a node that other parts compute."""
        cutter, todo = self.cutter, [node]
        while todo:
            reader = todo.pop()
            for x in reader.all_input_nodes:
                if node.meta["phase"] == UPDATE and x in cutter.written:  # at that point it has replaced the input
                    name = cutter.written[x]
                    self.input(cutter.step.inputs[name], name)
                    self.copies[x] = self.copies[cutter.step.inputs[name]]
                elif cutter.is_gradient(node, x):
                    self.input(x, cutter.gradients[x])
                elif x in cutter.names:
                    self.input(x, cutter.names[x])
                elif x in cutter.reads.copied:
                    todo.append(x)
                elif cutter.places[x] != self.place:
                    self.input(x, Kind.VALUE.at(x.name))
                    cutter.part_outputs[cutter.places[x]][Kind.VALUE.at(x.name)] = x

    def input(self, x: fx.Node, name: str) -> None:
        if name in self.inputs:
            return
        copy = self.graph.placeholder(x.name)
        copy.meta = {**x.meta}
        kind = kind_of(name)
        if kind == Kind.GRAD:
            label = self.cutter.step.gradient_label(path_of(name))
            copy.meta |= {"label": label, "phase": UPDATE, "flops": 0, "bytes": 0}
        elif kind == Kind.VALUE:
            copy.meta |= {"label": name, "flops": 0, "bytes": 0}
        self.inputs[name] = self.copies[x] = copy
        if kind in (Kind.GRAD, Kind.VALUE):
            self.cutter.readers[name].append(self.place)

    def finish(self, results: Mapping[str, fx.Node]) -> StepGraph:
        for node in self.members:
            self.copy(node)
        for node in results.values():  # an output may be an input, or a view of one, that no call reads
            if node in self.cutter.names and node not in self.copies:
                self.input(node, self.cutter.names[node])
            elif node in self.cutter.reads.copied:
                self.take(node)
            elif node in self.cutter.places and self.cutter.places[node] != self.place:  # another part computes it
                self.input(node, Kind.VALUE.at(node.name))
        outputs = {name: self.copy(node) for name, node in results.items()}
        self.graph.output(tuple(outputs.values()))
        return StepGraph(self.graph, self.inputs, outputs, self.cutter.step.constants, self.cutter.step.device)

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy a node into this part, with the views and constants that it reads. Returns the copy."""
        todo = [node]
        while todo:
            n = todo[-1]
            if n in self.copies:
                todo.pop()
            elif missing := [x for x in n.all_input_nodes if x not in self.copies]:
                todo += missing
            else:
                self.copies[n] = self.graph.node_copy(n, self.copies.__getitem__)
                if self.place.kind == PREPARATION:
                    self.copies[n].meta["phase"] = FORWARD
        return self.copies[node]


def _order(place: Place) -> tuple:
    """Sort key: preparations, forward parts by stage and chunk, backward parts in reverse, then the updates."""
    stage, kind, chunk = place
    if kind == PREPARATION:
        return -1, stage
    return (0, stage, chunk, "") if kind == "F" else (1, -stage, -chunk, kind) if kind in "BW" else (2, int(kind[1:]))
