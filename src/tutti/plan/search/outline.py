"""Outline: totals of seconds and bytes of a step, for its numbered layers and for everything else.

It is computed from the cheapest choices on a small mesh: context, expert and tensor parallelism, without data
parallelism or a pipeline. `plan.search.estimate` derives the effects of data parallelism, pipelines, microbatches and
recomputation from it in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np

from tutti.ir.kind import path_of
from tutti.ir.labels import in_layer, is_layer
from tutti.ir.step_graph import FORWARD, UPDATE
from tutti.plan.layouts.experts import Experts
from tutti.plan.layouts.price import Pricer
from tutti.plan.layouts.roles import STATELESS
from tutti.plan.planner import Candidate, Planner
from tutti.plan.search.recompute import Activations


@dataclass(frozen=True)
class Sums:
    """Totals over operators and inputs on one rank.

    forward, backward, update: seconds; of the forward and backward pass those of computing.
    sent: seconds of communication in the forward pass; back: in the backward pass.
    params: bytes of parameters; experts: the part of them that belongs to experts.
    state: bytes of optimizer state.
    activations: bytes that the forward pass keeps for the backward pass; boundaries: the part kept even with
        recomputation of layers.
    attention: seconds of attention in the forward pass; scores: the part of `activations` that it makes.
    workspaces: bytes that the forward pass also keeps if the backward pass is in the same Program (`ops.workspaces`).
    repeats: seconds that the backward pass computes again if it is not.
    """

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    params: float = 0.0
    experts: float = 0.0
    state: float = 0.0
    activations: float = 0.0
    boundaries: float = 0.0
    sent: float = 0.0
    back: float = 0.0
    attention: float = 0.0
    scores: float = 0.0
    workspaces: float = 0.0
    repeats: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Sums)))

    def split(self, parts: int, experts: int) -> Sums:
        """The totals if `parts` ranks divide all work and tensors, and `experts` ranks the parameters of experts."""
        dense = (self.params - self.experts) / parts
        sparse = self.experts / experts
        share = (dense + sparse) / self.params if self.params else 0.0
        return Sums(self.forward / experts, self.backward / experts, self.update * share, dense + sparse, sparse,
                    self.state * share, self.activations / experts, self.boundaries / experts, self.sent / experts,
                    self.back / experts, self.attention / experts, self.scores / experts,
                    self.workspaces / experts, self.repeats / experts)  # fmt: skip

    def scaled(self, other: Sums, ideal: Sums) -> Sums:
        """Larger than the ideal as another total is than its own."""
        return Sums(*(getattr(self, f.name) * max(1.0, getattr(other, f.name) / getattr(ideal, f.name))
                      if getattr(ideal, f.name) else 0.0 for f in fields(Sums)))  # fmt: skip


@dataclass(frozen=True)
class Outline:
    """Totals of a step.

    layers: totals over the numbered layers.
    beside: totals over everything else.
    depth: number of numbered layers.
    border: bytes passed from one layer to the next.
    largest: bytes of the largest activation.
    once: seconds per microbatch that do not depend on its rows, for layers and for the rest. The seconds in `layers`
        and `beside` are proportional to the rows and are added to these.
    """

    layers: Sums
    beside: Sums
    depth: int
    border: float
    largest: float
    once: tuple[Sums, Sums] = (Sums(), Sums())

    @property
    def attention_share(self) -> float:
        """The share of the layers' forward pass that attention takes."""
        return self.layers.attention / self.layers.forward if self.layers.forward else 1.0

    def seconds(self, rows: np.ndarray, repeated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds that a microbatch with these shares of the rows computes, in layers and beside. repeated: shares of
        the layers' forward pass that the backward pass repeats."""
        (forward, backward), (beside, beside_backward) = (
            (s.forward * rows + o.forward, s.backward * rows + o.backward)
            for s, o in zip((self.layers, self.beside), self.once, strict=True)
        )
        return forward * (1 + repeated) + backward, beside + beside_backward

    def moves(self, rows: np.ndarray, again: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of communication in microbatches. again: whether all of a layer is recomputed."""
        return (
            rows * (self.layers.sent * (1 + again) + self.layers.back),
            rows * (self.beside.sent + self.beside.back),
        )

    def by_rows(self, least: Outline, parts: int) -> Outline:
        """Separates the seconds that do not depend on the rows. least: the outline of 1 / `parts` of the batch."""
        once, rest = [], []
        for whole, part in ((self.layers, least.layers), (self.beside, least.beside)):
            constant = {kind: max(0.0, (getattr(part, kind) - getattr(whole, kind) / parts) / (1 - 1 / parts))
                     for kind in ("forward", "backward")}  # fmt: skip
            once.append(Sums(**constant))
            rest.append(replace(whole, **{kind: max(0.0, getattr(whole, kind) - t) for kind, t in constant.items()}))
        return replace(self, layers=rest[0], beside=rest[1], once=(once[0], once[1]))

    def split(self, parts: int, experts: int) -> Outline:
        """A lower bound for a mesh of `experts` devices, `parts` of which divide everything but the experts."""
        return replace(self, layers=self.layers.split(parts, experts), beside=self.beside.split(parts, experts),
                       border=self.border / experts, largest=self.largest / experts,
                       once=(self.once[0].split(parts, experts), self.once[1].split(parts, experts)))  # fmt: skip

    def scaled(self, other: Outline, ideal: Outline) -> Outline:
        """Larger than this bound as another outline is than its own bound."""
        more = {kind: getattr(self, kind) * max(1.0, getattr(other, kind) / (getattr(ideal, kind) or 1.0))
                for kind in ("border", "largest")}  # fmt: skip
        return replace(self, layers=self.layers.scaled(other.layers, ideal.layers),
                       beside=self.beside.scaled(other.beside, ideal.beside), **more)  # fmt: skip


def outline_of(planner: Planner, candidate: Candidate, activations: Activations) -> Outline:
    """The outline of a step's cheapest choices. activations: those of the planner's step."""
    problem, inside = planner.problem, activations.inside_layers
    costs = candidate.joint.costs(candidate.chosen)
    shapes, attention = Experts(problem).shapes, activations.attention
    one_program, chosen = Pricer(planner.cluster, candidate.mesh), candidate.chosen.choices
    layers, beside, largest = Sums(), Sums(), 0.0
    for label, o in problem.operators.items():
        cost, count = costs[label], o.count
        seconds, moves, activation_bytes = (
            count * float(cost.seconds),
            count * float(cost.moves),
            count * float(cost.activations),
        )
        if o.is_input:
            size = count * float(cost.stored)
            param = size if o.kind == "param" else 0.0
            own = Sums(update=seconds, params=param, experts=param if o.outputs[0].shape in shapes else 0.0,
                       state=0.0 if o.kind in STATELESS else size)  # fmt: skip
            path = path_of(label)
        else:
            boundary = 0.0 if label in inside else activation_bytes
            own = Sums(
                activations=activation_bytes,
                boundaries=boundary,
                scores=activation_bytes if label in attention else 0.0,
                workspaces=count * o.workspace / prod(candidate.mesh[axis] for axis in chosen[label]),
            )
            if o.phase == UPDATE:
                own = replace(own, update=seconds)
            elif o.phase == FORWARD:
                own = replace(own, forward=seconds - moves, sent=moves)
                own = replace(own, attention=own.forward if label in attention else 0.0)
            else:
                own = replace(own, backward=seconds - moves, back=moves)
                if o.one_program:
                    own = replace(own, repeats=own.backward - count * one_program.compute(o, chosen[label]))
            largest = max(largest, float(cost.activations))
            path = o.node.meta["path"]
        if in_layer(path):
            layers += own
        else:
            beside += own
    depth = sum(map(is_layer, planner.layers.members))
    borders = [sum(n * problem.operators[label].outputs[i].bytes for (label, i), n in border.items())
               for border in planner.layers.borders]  # fmt: skip
    middle = sorted(borders)[len(borders) // 2] if borders else 0
    return Outline(layers, beside, max(depth, 1), float(middle), largest)
