"""Plan: defines how a step runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tutti.ir.kind import Kind, kind_of, path_of
from tutti.ir.step_graph import GUARD, StepGraph
from tutti.plan.explain import explain
from tutti.plan.layouts.choice import Choices, parse_choice
from tutti.plan.layouts.layout import Layout, Mesh, parse_placement
from tutti.plan.pipeline.schedule import NO_PIPE, Pipe
from tutti.plan.tier import check_tiers
from tutti.plan.variant import MATMULS, Variant

DECISIONS = (  # fields that define how a step runs, except durations
    "mesh", "accumulate", "sum_dtype", "schedule", "sequence_chunks", "recompute", "tiers", "batch_splits",
    "overlap_chunks", "matmul_dtype", "reround", "node_size", "stages", "inputs", "operators",
)  # fmt: skip
SUMS = ("", "float32")  # dtypes of sums of gradients
PIPELINE = "pp"  # the mesh axis of a pipeline, the outermost


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a plan, per step and rank, from simulating its programs.

    step_seconds: duration of a step.
    compute_seconds: time in which a rank computes.
    communication_seconds: time in which it waits for communication.
    communication_bytes: bytes that one rank sends.
    fraction_of_peak: share of the devices' peak FLOP/s, counting the work of the whole model.
    peak_bytes: peak memory.
    bytes_by_kind: what the peak consists of.
    collectives: "all_reduce over dp" -> [number, bytes sent].
    level: the level that was simulated.
    bubble_seconds: time in which a rank waits for other devices of a pipeline.
    transfer_seconds: time in which it waits for transfers between tiers.
    bytes_by_tier: peak memory on the other tiers.
    hidden_seconds: time in which collectives run while it computes.
    peak_dtype: dtype of the peak of `fraction_of_peak`: that of most of the matrix work, as far as its peak is known.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    communication_bytes: int
    fraction_of_peak: float
    peak_bytes: int
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    collectives: Mapping[str, list[int]] = field(default_factory=dict)
    level: str = ""
    bubble_seconds: float = 0.0
    transfer_seconds: float = 0.0
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    hidden_seconds: float = 0.0
    peak_dtype: str = ""


@dataclass(frozen=True)
class Plan:
    """How each operator is split and how each input is laid out, by label.

    mesh: axis -> size, outermost first; ranks are numbered row-major.
    inputs: label of an input -> its layout. Inputs that are not listed are replicated.
    operators: label of an operator -> axis -> choice. Operators that are not listed run whole on every rank.
    accumulate: microbatches per update.
    sum_dtype: "float32" to add gradients of microbatches in float32 if they have less precision
        (`lower.parts.gradient_sums`); by default they are added in their own dtype.
    stages: path of a module, or name of a forward node -> its pipeline stage (`plan.pipeline.stages`), over the axis
    `pp`.
    schedule: name of the pipeline's schedule (`plan.pipeline.schedule`). A function has none: a call runs each stage
    once.
    sequence_chunks: chunks of the sequence (`lower.variants.unroll`).
    recompute: what the backward pass recomputes: labels of forward nodes, or as in `plan.search.recompute.chosen`.
    tiers: label of an input, or of a forward node whose result waits for the backward pass -> the tier that stores it
        (`plan.tier`).
    batch_splits: number of parts of the batch that overlap computation and communication (`lower.variants.unroll`).
    overlap_chunks: number of parts of each region between collectives, for the same purpose (`lower.overlap.regions`).
    matmul_dtype: format of the matrix products of layers (`nn.linear.scaled_mm`); by default the model's dtype.
    reround: whether weights are rounded to that format in every microbatch, instead of once a step and kept
        (`lower.parts.weight_roundings`). They are in any case if `tiers` stores tensors elsewhere.
    node_size: neighbouring devices to whose node a token travels once on the way to its experts; 0 if it travels to
        each device directly (`ops.experts.experts_exchange`).
    durations: modeled seconds of each stage for a microbatch (`plan.pipeline.slots`); the schedule `auto` uses them.
    reasons: why this plan was chosen, in words.
    """

    mesh: Mesh
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    operators: Mapping[str, Choices] = field(default_factory=dict)
    accumulate: int = 1
    sum_dtype: str = ""
    stages: Mapping[str, int] = field(default_factory=dict)
    schedule: str = ""
    sequence_chunks: int = 1
    recompute: tuple[str, ...] = ()
    tiers: Mapping[str, str] = field(default_factory=dict)
    batch_splits: int = 1
    overlap_chunks: int = 1
    matmul_dtype: str = ""
    reround: bool = False
    node_size: int = 0
    durations: tuple[tuple[float, ...], ...] = ()
    name: str = ""
    graph: str = ""  # fingerprint of the graph that the plan was made for
    cluster: str = ""
    prediction: Prediction | None = None
    reasons: tuple[str, ...] = ()

    def input_layout(self, label: str) -> Layout:
        return self.inputs.get(label, Layout())

    def choices(self, label: str) -> Choices:
        return self.operators.get(label, {})

    @property
    def inner(self) -> Mesh:
        """The mesh of each pipeline device: all axes but the pipeline's."""
        return inner_of(self.mesh)

    @property
    def pipe(self) -> Pipe:
        """The pipeline; of one device if there are no stages. Raises ValueError if devices do not divide the stages."""
        if not self.stages:
            return NO_PIPE
        devices, stages = self.mesh[PIPELINE], 1 + max(self.stages.values())
        if stages % devices:
            raise ValueError(f"{stages} stages do not divide over {devices} devices of a pipeline")
        return Pipe(devices, self.schedule, stages // devices, self.sequence_chunks)

    @property
    def variant(self) -> Variant:
        """The variant of the step's graph that the plan requires."""
        return Variant(self.sequence_chunks, self.recompute, self.batch_splits, self.matmul_dtype)

    @property
    def predicted(self) -> Prediction:
        """The prediction, which every plan from a search has."""
        assert self.prediction is not None
        return self.prediction

    def replace(self, **changes) -> Plan:
        return replace(self, **changes)

    def check(self, step: StepGraph) -> None:
        """Raise ValueError if the plan names labels or axes that the graph or the plan's mesh does not have, or if it
        needs another variant of the graph."""
        if self.sequence_chunks != step.sequence_chunks:
            raise ValueError(
                f"the plan cuts the sequence into {self.sequence_chunks} chunks, the step into {step.sequence_chunks}"
            )
        if self.batch_splits != step.batch_splits:
            raise ValueError(
                f"the plan cuts the batch into {self.batch_splits} copies, the step into {step.batch_splits}"
            )
        if self.overlap_chunks > 1 and (self.stages or self.tiers or self.batch_splits > 1):
            other = "stages" if self.stages else "tiers" if self.tiers else "batch_splits"
            raise ValueError(f"the plan computes regions in {self.overlap_chunks} parts, which excludes {other}")
        if self.matmul_dtype not in ("", *MATMULS.values()):
            formats = ", ".join(map(repr, MATMULS.values()))
            raise ValueError(f"matmul_dtype {self.matmul_dtype!r}: products are in {formats}, or '' in their own dtype")
        if not isinstance(self.reround, bool):
            raise ValueError(f"reround {self.reround!r}: true, or false to round weights once a step")
        if self.reround and not self.matmul_dtype:
            raise ValueError("reround is for weights of products in low precision, and matmul_dtype is ''")
        if not isinstance(self.node_size, int) or self.node_size < 0 or self.node_size == 1:
            raise ValueError(f"node_size {self.node_size!r}: a node has at least 2 devices; 0 sends tokens directly")
        if self.sum_dtype not in SUMS:
            raise ValueError(f"sum_dtype {self.sum_dtype!r}: gradients are added in 'float32', or '' in their own")
        labels = {node.meta["label"] for node in step.graph.nodes if "label" in node.meta}
        if unknown := [label for label in self.recompute if "/" in label and label not in labels]:
            raise ValueError(f"the plan recomputes {unknown[0]!r}, which this model does not have")
        checkpointed = ["checkpoint" in node.meta for node in step.calls if "recompute" in node.meta]
        if (self.recompute and not checkpointed) or (not self.recompute and not all(checkpointed)):
            does, has = ("recomputes", "does not") if self.recompute else ("does not recompute", "does")
            raise ValueError(
                f"the plan {does} operators, but the step {has} (tutti.lower.variants.vary makes such a step)"
            )
        if unknown := [label for label in self.tiers if label not in labels]:
            raise ValueError(_stranger(unknown, labels))
        check_tiers(self.tiers, step)
        labels |= {step.gradient_label(name) for name in step.names("param")}
        axes = {label: layout.splits | layout.partials for label, layout in self.inputs.items()}
        named = [label for label in (*self.inputs, *self.operators) if not label.startswith(f"{GUARD}/")]
        if unknown := [label for label in named if label not in labels]:
            raise ValueError(_stranger(unknown, labels))
        if bool(self.stages) != (PIPELINE in self.mesh) or (self.stages and next(iter(self.mesh)) != PIPELINE):
            raise ValueError(
                f"a pipeline needs stages and {PIPELINE!r} as the outermost axis; the mesh is {dict(self.mesh)}"
            )
        for label, bytes_on in [*axes.items(), *self.operators.items()]:
            for axis in bytes_on:
                if axis not in self.mesh:
                    raise ValueError(f"the plan splits {label!r} over axis {axis!r}; its mesh has {list(self.mesh)}")

    def explain(self) -> str:
        """A text: the plan's cost, layouts, communication, and the reasons for it."""
        return explain(self)

    def to_json(self) -> str:
        """All fields as JSON, the long ones last."""
        names = sorted(
            (f.name for f in fields(self)), key=lambda name: (name in ("inputs", "operators"), name != "name")
        )
        return json.dumps({name: _encoded(getattr(self, name)) for name in names}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of `to_json`. Raises ValueError if the text is not a plan."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a plan: {error}") from None
        fields = set(Plan.__dataclass_fields__)
        if not isinstance(data, dict) or "mesh" not in data or set(data) - fields:
            unknown = sorted(set(data) - fields) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a plan: a plan is an object with the keys {sorted(fields)}; found {unknown}")
        for key in ("inputs", "operators", "tiers", "stages"):
            if not isinstance(data.get(key, {}), dict):
                raise ValueError(f"not a plan: its {key} are an object, by label; found {type(data[key]).__name__}")
        try:
            return Plan(**{name: DECODED.get(name, _tupled)(value) for name, value in data.items()})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a plan: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        return Plan.from_json(Path(path).read_text())

    def diff(self, other: Plan) -> list[str]:
        """The differences, one line each: `-` in this plan, `+` in the other."""
        lines = []
        for what in DECISIONS:
            ours, theirs = getattr(self, what), getattr(other, what)
            if not isinstance(ours, Mapping):
                ours, theirs = {what: ours or None}, {what: theirs or None}
            for key in dict.fromkeys([*ours, *theirs]):
                mine, its = _show(ours.get(key)), _show(theirs.get(key))
                if mine != its:
                    lines += [
                        f"{sign} {key}: {value}" for sign, value in (("-", mine), ("+", its)) if value is not None
                    ]
        return lines


def inner_of(mesh: Mesh) -> Mesh:
    """The mesh of each device of a pipeline: all axes but the pipeline's."""
    return {axis: n for axis, n in mesh.items() if axis != PIPELINE} or {"dp": 1}


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with renamed axes."""

    def rename(by_axis: Mapping) -> dict:
        return {names.get(axis, axis): value for axis, value in by_axis.items()}

    return plan.replace(
        mesh=rename(plan.mesh),
        inputs={label: Layout.of(rename(dict(layout.placements))) for label, layout in plan.inputs.items()},
        operators={label: rename(choices) for label, choices in plan.operators.items()},
    )


def _stranger(unknown: list[str], labels: set[str]) -> str:
    """Why a plan with these labels does not match the step: another model, optimizer or update."""
    state = [label for label in unknown if Kind.PARAM.at(path_of(label)) in labels]
    update = [label for label in unknown if "/update/" in label]
    if rest := [label for label in unknown if label not in {*state, *update}]:
        near = get_close_matches(rest[0], labels, 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        return f"the plan names {rest[0]!r}, which this model does not have{hint}"
    remedy = "; build the step as before, or search a new plan"
    kinds = dict.fromkeys(kind_of(label) for label in state)
    if "master" in kinds:
        return (
            f"the plan was made for a step with float32 masters (fp32_master_weights=True), this one has none{remedy}"
        )
    if kinds:
        path = path_of(state[0])
        return f"the plan was made for an optimizer that keeps {', '.join(kinds)} of {path}, this one does not{remedy}"
    return (
        f"the plan was made for another update: another clip_norm, masters or options of the optimizer "
        f"({update[0]!r} is not in this step){remedy}"
    )


def _encoded(value: Any) -> Any:
    """A field as JSON stores it. Placements and choices become text."""
    if isinstance(value, Prediction):
        return asdict(value)
    if isinstance(value, Layout):
        return _encoded(dict(value.placements))
    if isinstance(value, Mapping):
        return {key: _encoded(x) for key, x in value.items()}
    if isinstance(value, tuple):
        return [_encoded(x) for x in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


DECODED: dict[str, Callable[[Any], Any]] = {  # fields that need conversion from JSON
    "prediction": lambda x: Prediction(**x) if x else None,
    "inputs": lambda x: {key: Layout.of({a: parse_placement(p) for a, p in v.items()}) for key, v in x.items()},
    "operators": lambda x: {key: {a: parse_choice(c) for a, c in v.items()} for key, v in x.items()},
}


def _show(value) -> str | None:
    if isinstance(value, Mapping):
        return " ".join(f"{axis}:{choice}" for axis, choice in value.items())
    return None if value is None else str(value)
