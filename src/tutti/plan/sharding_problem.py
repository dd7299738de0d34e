"""The choices of all mesh axes for all operators at once, as a cost network.

Variables are operators and inputs, one for each label; their states are `Options`, so no axis is decided before
another. A pair joins the maker of a tensor to a reader and costs the move between how the one makes it and the other
reads it. Costs are seconds of a step:

    unary[o][s]     = runs(o) * price of the local part of o under s           `ShardingProblem.operator`
    pair[o,r][s,t]  = runs of the move * price of the move                     `ShardingProblem.edge`

A tensor with several readers has *hubs* between, with a layout as state: one where it is settled for all phases, and
one for each phase in which several read it. What readers share is so paid once, and what is gathered is gathered anew
in each phase, as lowering does (`lower.shard`).

    bytes[v][s]     = of inputs, of what the forward pass keeps for the backward, and
                      of gradients, which the backward keeps for the update         `ShardingProblem.keep`
                      where they accumulate, wait for one another, or make few pieces (`lower.inplace`)
    bytes[u,v][s,t] = of what a move makes: of all that a view keeps, and of one that passes   `ShardingProblem.version`

are constrained by what a rank has: a price on them is added to the costs (`ShardingProblem.choose`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE
from tutti.plan.choice import Choice
from tutti.plan.minimize import CLOSE, minimize
from tutti.plan.moves import Moves
from tutti.plan.network import NEVER, Network
from tutti.plan.options import Allowed, Given, OptionTable
from tutti.plan.price import PIECE, Pricer
from tutti.plan.problem import Edge, Operator, Problem, Tensor
from tutti.plan.work import Work

FEW = 4  # pieces, of which it does not matter whether they are there together


@dataclass(frozen=True)
class Solution:
    """The choices of every operator by axis, their modelled cost in seconds, and a lower bound of any's.

    kept: bytes of a rank's inputs and of what its forward pass keeps for the backward, or the backward for the update
    where that is more. seconds: the cost without memory's; price: of a byte of these, and of what passes, which cost
    and bound include. states: of all variables.
    """

    choices: dict[str, dict[str, Choice]]
    cost: float
    bound: float
    gap: float
    kept: float
    seconds: float
    price: float = 0.0
    states: Mapping[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Cost:
    """Of one node, on one rank. seconds: of one run. kept: bytes of an input, or of a gradient for the update. held:
    bytes that the forward pass of a microbatch keeps for its backward pass."""

    seconds: float = 0.0
    kept: float = 0.0
    held: float = 0.0


@dataclass(frozen=True)
class _Version:
    """Bytes of what a move between two variables makes: held by a view until the backward pass, or there in passing."""

    source: str
    reader: str
    held: int
    passing: int
    made: np.ndarray
    read: np.ndarray
    parts: np.ndarray

    def bytes(self, source, reader, size: int | None = None) -> np.ndarray:
        """For these states of the two. size: by default what is held and what passes."""
        moved = (self.made[source][:, None, :] != self.read[reader][None, :, :]).any(-1)
        return moved * ((self.held + self.passing if size is None else size) / self.parts[reader])


class ShardingProblem:
    """The choices for a problem on the pricer's mesh.

    runs: how often each phase runs in a step (microbatches); 1 where it is not named. in_flight: microbatches whose
    activations are kept at once. allowed, given: see `OptionTable`.
    """

    def __init__(self, problem: Problem, pricer: Pricer, runs: Mapping[str, int] | None = None,
                 allowed: Allowed | None = None, given: Given | None = None, in_flight: float = 1):  # fmt: skip
        self.problem, self.pricer, self.runs = problem, pricer, runs or {}
        self.network = Network()
        self.bytes: dict[str, np.ndarray] = {}  # by variable what its states keep in memory: of inputs,
        self.activations: dict[str, np.ndarray] = {}  # what the forward pass keeps for the backward,
        self.gradients: dict[str, np.ndarray] = {}  # and the backward for the update
        self.versions: list[_Version] = []  # what moves make
        self.hubs: dict[str, tuple[Tensor, str]] = {}  # what lies there, and the first who reads it
        self.holding = _holding(problem)
        self.together = self.runs.get(BACKWARD, 1) > 1 or problem.coupled or problem.gradient_bytes <= FEW * PIECE
        self.moves = {
            FORWARD: Moves(pricer.mesh, pricer.collective),
            UPDATE: Moves(pricer.mesh, pricer.bucketed),
        }
        self.tables = ((self.bytes, 1), (self.activations, in_flight), (self.gradients, 1))
        table = OptionTable(pricer.mesh, problem.cuts, allowed, given)
        self.options = {label: table[o] for label, o in problem.operators.items()}
        for o in problem.operators.values():
            self.operator(o)
        readers: dict[Tensor, list[Edge]] = defaultdict(list)
        for edge in problem.edges:
            readers[edge.tensor].append(edge)
        for tensor, edges in readers.items():
            self.tensor(tensor, edges)
        for tensor in problem.outputs:
            made = self.options[tensor[0]].outputs[tensor[1]]
            self.network.add(tensor[0], self.move(tensor, made, np.zeros((1, made.shape[1]), dtype=int), FORWARD)[:, 0])

    def choose(
        self,
        memory_price: float = 0.0,
        seconds: float = 60.0,
        only: Mapping[str, int] | None = None,
        close: float = CLOSE,
        work: Work | None = None,
    ) -> Solution:
        """The cheapest choices. memory_price: seconds a byte, the multiplier of the constraint that memory sets.
        only: options that are taken for granted, by label. close: a gap, relative, that need not be closed.
        seconds: of work (`plan.work`).

        Raises ValueError where no combination is possible.
        """
        network = self.network.copy()
        for table, times in self.tables if memory_price else ():
            for name, held in table.items():
                network.add(name, memory_price * times * held)
        for move in self.versions if memory_price else ():
            network.join(move.source, move.reader, memory_price * move.bytes(slice(None), slice(None)))
        for label, option in (only or {}).items():
            network.add(label, np.where(np.arange(len(self.options[label])) == option, 0.0, NEVER))
        solution = minimize(network, seconds, close, work)
        choices = {label: dict(options.choices[solution.states[label]]) for label, options in self.options.items()}
        states = solution.states
        inputs, activations, gradients = (
            times * sum(held[states[name]] for name, held in table.items()) for table, times in self.tables
        )
        moved = [(move, *(np.atleast_1d(states[x]) for x in (move.source, move.reader))) for move in self.versions]
        versions = sum(move.bytes(s, t).item() for move, s, t in moved)
        passing = sum(move.bytes(s, t, move.passing).item() for move, s, t in moved)
        kept = inputs + max(activations + versions - passing, gradients)
        seconds = solution.cost - memory_price * (inputs + activations + gradients + versions)
        return Solution(
            choices, solution.cost, solution.bound, solution.gap, float(kept), seconds, memory_price, states
        )

    def costs(self, chosen: Solution) -> dict[str, Cost]:
        """What each operator and input of a label costs, with the moves of what it reads, on a rank."""
        network, x = self.network, chosen.states
        taken = Counter({label: network.unary[label][x[label]] for label in self.options})
        for u, v in network.edges():
            taken[self.payer(u, v)] += network.pairs[u][v][x[u], x[v]]
        kept: Counter[str] = Counter()
        held: Counter[str] = Counter()
        for table, sums in ((self.bytes, kept), (self.gradients, kept), (self.activations, held)):
            for name, states in table.items():
                sums[self.hubs[name][0][0] if name in self.hubs else name] += states[x[name]]
        return {
            label: Cost(
                taken[label] / (o.count * self.runs.get(o.phase, 1)), kept[label] / o.count, held[label] / o.count
            )
            for label, o in self.problem.operators.items()
        }

    def payer(self, u: str, v: str) -> str:
        """The operator on whose account the move between two variables is: who reads."""
        hubs = [name for name in (u, v) if name in self.hubs]
        if hubs:
            (tensor, reader), other = self.hubs[hubs[-1]], u if hubs[-1] == v else v
            return reader if other == tensor[0] or other in self.hubs else other
        return u if self.problem.operators[v].is_input else v

    def operator(self, o: Operator) -> None:
        options = self.options[o.label]
        costs = np.array([self.pricer.compute(o, choices) for choices in options.choices])
        costs *= o.count * self.runs.get(o.phase, 1)
        self.network.add(o.label, costs)
        if o.is_input:
            self.keep(self.bytes, o.label, o.count * o.outputs[0].bytes, options.outputs[0])

    def tensor(self, tensor: Tensor, edges: list[Edge]) -> None:
        """Join the maker of a tensor to all readers."""
        phases: dict[str, list[Edge]] = defaultdict(list)
        for edge in edges:
            phases[self.phase(edge)].append(edge)
        source, made = tensor[0], self.options[tensor[0]].outputs[tensor[1]]
        weight = min(self.problem.operators[source].count, sum(self.problem.edges[e] for e in edges))
        maker = self.problem.operators[source]
        # What the backward pass reads stays until then, itself or as a view of it, which has no memory of its own.
        kept = any(self.holds(e) or self.phase(e) == BACKWARD for e in edges)
        kept = kept and maker.phase == FORWARD and not maker.is_input and maker.bytes
        held = weight * maker.outputs[tensor[1]].bytes
        if self.together and UPDATE in phases and maker.phase == BACKWARD and maker.bytes:
            self.keep(self.gradients, source, held, made)
        if len(edges) > 1:
            layouts = _unique([made, *(self.read(edge) for edge in edges)])
            several = len(phases) > 1
            held_as_moved = held * (bool(maker.is_input) and any(map(self.holds, edges)))
            source, made = self.hub(tensor, "", (source, made), layouts, weight, _first(phases), held_as_moved,
                                    edges[0].reader, gathers=not several)  # fmt: skip
            if kept:
                self.keep(self.activations, source, held, made)
            for phase, group in phases.items():
                if several and len(group) > 1:
                    as_moved = held * any(map(self.holds, group))
                    hub = self.hub(tensor, phase, (source, made), layouts, weight, phase, as_moved, group[0].reader)
                    for edge in group:
                        self.edge(edge, *hub)
                else:
                    for edge in group:
                        self.edge(edge, source, made)
        else:
            if kept:
                self.keep(self.activations, source, held, made)
            self.edge(edges[0], source, made)

    def hub(
        self, tensor: Tensor, name: str, source, layouts, weight: int, phase: str, held: int, reader: str,
        gathers: bool = True,
    ):  # fmt: skip
        """A variable for how a tensor lies: its name and states. held: bytes that a view keeps of what is moved."""
        hub = f"{tensor[0]} [{tensor[1]}] {name}"
        costs = weight * self.runs.get(phase, 1) * self.move(tensor, source[1], layouts, phase)
        if not gathers:
            costs = np.where(self.moves[FORWARD].gathers(source[1], layouts), NEVER, costs)
        self.hubs[hub] = tensor, reader
        self.network.add(hub, np.zeros(len(layouts)))
        self.network.join(source[0], hub, np.minimum(costs, NEVER))
        self.version(tensor, source[0], hub, held, source[1], layouts)
        return hub, layouts

    def keep(self, table: dict[str, np.ndarray], name: str, size: int, layouts: np.ndarray) -> None:
        """A variable's states are layouts of so many bytes that stay in memory."""
        table[name] = table.get(name, 0) + size / self.moves[FORWARD].parts(layouts)

    def version(self, tensor: Tensor, source: str, reader: str, held: int, made: np.ndarray, read: np.ndarray) -> None:
        """What is made by a move between the two: one at a time is there in passing, and `held` bytes stay."""
        one = self.problem.operators[tensor[0]].outputs[tensor[1]].bytes
        self.versions.append(_Version(source, reader, held, one, made, read, self.moves[FORWARD].parts(read)))

    def holds(self, edge: Edge) -> bool:
        return edge.operand >= 0 and edge.reader in self.holding

    def edge(self, edge: Edge, source: str, made: np.ndarray) -> None:
        maker, phase = self.problem.operators[edge.tensor[0]], self.phase(edge)
        weight = min(maker.count, self.problem.edges[edge])
        costs = weight * self.runs.get(phase, 1) * self.move(edge.tensor, made, self.read(edge), phase)
        self.network.join(source, edge.reader, np.minimum(costs, NEVER))
        held = weight * maker.outputs[edge.tensor[1]].bytes * self.holds(edge)
        self.version(edge.tensor, source, edge.reader, held, made, self.read(edge))

    def read(self, edge: Edge) -> np.ndarray:
        """The layouts in which the reader asks for the tensor; the successor of an input lies as the input does."""
        options = self.options[edge.reader]
        return options.outputs[0] if edge.operand < 0 else options.inputs[edge.operand]

    def phase(self, edge: Edge) -> str:
        return UPDATE if edge.operand < 0 else self.problem.operators[edge.reader].phase

    def move(self, tensor: Tensor, source: np.ndarray, target: np.ndarray, phase: str) -> np.ndarray:
        """Prices for each state of one and the other, found once for each layout."""
        size = self.problem.operators[tensor[0]].outputs[tensor[1]].bytes
        sources, which = np.unique(source, axis=0, return_inverse=True)
        targets, whither = np.unique(target, axis=0, return_inverse=True)
        moves = self.moves[UPDATE if phase == UPDATE else FORWARD]
        return moves.table(sources, targets, size)[which.ravel()[:, None], whither.ravel()[None, :]]


def _holding(problem: Problem) -> set[str]:
    """Views of the forward pass that the backward pass reads: what they look at stays until then."""
    found: set[str] = set()
    views = {label for label, o in problem.operators.items() if o.phase == FORWARD and not (o.is_input or o.bytes)}
    todo = [e.tensor[0] for e in problem.edges if problem.operators[e.reader].phase != FORWARD]
    makers = defaultdict(list)
    for edge in problem.edges:
        makers[edge.reader].append(edge.tensor[0])
    while todo:
        label = todo.pop()
        if label in views and label not in found:
            found.add(label)
            todo += makers[label]
    return found


def _unique(layouts: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(layouts), axis=0)


def _first(phases: Mapping[str, list[Edge]]) -> str:
    return next(phase for phase in (FORWARD, BACKWARD, UPDATE) if phase in phases)
