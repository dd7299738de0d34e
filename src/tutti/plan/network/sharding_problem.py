"""The choices of all mesh axes for all operators at once, as a cost network.

A variable is an operator or input, one per label. Its states are `Options`, each of which decides all axes together. A
pair connects the maker of a tensor with a reader. It costs the move from the layout that one makes to the layout that
the other reads. Costs are seconds of a step:

    unary[o][s]     = runs(o) * price of the local part of o under s           `ShardingProblem.operator`
    pair[o,r][s,t]  = runs of the move * price of the move                     `ShardingProblem.edge`

A tensor with several readers has *hubs* between maker and readers, whose states are layouts: one hub for all phases,
and one for each phase with several readers. Readers thus pay for a shared move once. A gather is repeated in each
phase, as in lowering (`lower.shard`).

Memory is constrained by a price per byte that is added to the costs (`plan.network.memory_costs`).
Gradients count only if they accumulate, wait for one another, or form few pieces (`lower.memory.inplace`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE
from tutti.plan.layouts.choice import Choice
from tutti.plan.layouts.options import Allowed, OptionTable, Required
from tutti.plan.layouts.price import PIECE, Pricer
from tutti.plan.layouts.problem import Edge, Operator, Problem, Tensor
from tutti.plan.layouts.reshard_costs import Moves
from tutti.plan.network.memory_costs import MemoryTables
from tutti.plan.network.minimize import CLOSE, minimize
from tutti.plan.network.network import NEVER, Network
from tutti.plan.network.work import WorkClock

FEW = 4  # gradients of at most this many pieces are counted as if all were in memory at once


@dataclass(frozen=True)
class Solution:
    """The choices of every operator by axis, with their modelled cost.

    cost: modelled cost in seconds, with the price of memory.
    bound: lower bound of the cost of any choices; gap: relative difference of the two.
    memory: bytes of a rank's inputs, and of its activations or its gradients, whichever are larger; of both if
        gradients of microbatches accumulate.
    seconds: the cost without the price of memory.
    price: seconds per byte. Cost and bound include it for the kept bytes and for temporary results of moves.
    states: state of each variable.
    """

    choices: dict[str, dict[str, Choice]]
    cost: float
    bound: float
    gap: float
    memory: float
    seconds: float
    price: float = 0.0
    states: Mapping[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Cost:
    """Cost of one node on one rank.

    seconds: duration of one run. moves: the part of it for the moves of operands.
    stored: bytes of an input, or of a gradient that is kept for the update.
    activations: bytes that the forward pass of a microbatch keeps for its backward pass.
    """

    seconds: float = 0.0
    stored: float = 0.0
    activations: float = 0.0
    moves: float = 0.0


class ShardingProblem:
    """The choices for a problem on the pricer's mesh.

    runs: number of runs of each phase in a step (microbatches); 1 for phases that are not listed.
    in_flight: microbatches whose activations are kept at once.
    allowed, required, in_order: see `OptionTable`.
    """

    def __init__(self, problem: Problem, pricer: Pricer, runs: Mapping[str, int] | None = None,
                 allowed: Allowed | None = None, required: Required | None = None, in_flight: float = 1,
                 in_order: Collection[str] = ()):  # fmt: skip
        self.problem, self.pricer, self.runs = problem, pricer, runs or {}
        self.network = Network()
        self.hubs: dict[str, tuple[Tensor, str]] = {}  # the tensor of each hub, and its first reader
        self.saved_views = _saved_views(problem)
        self.together = self.runs.get(BACKWARD, 1) > 1 or problem.coupled or problem.gradient_bytes <= FEW * PIECE
        self.moves = {
            FORWARD: Moves(pricer.mesh, pricer.collective),
            UPDATE: Moves(pricer.mesh, pricer.bucketed),
        }
        self.memory = MemoryTables(self.moves[FORWARD], in_flight, self.runs.get(BACKWARD, 1) > 1)
        self.move_prices: dict[tuple, np.ndarray] = {}
        self.compute_prices: dict[tuple, np.ndarray] = {}
        table = OptionTable(pricer.mesh, problem.cuts, allowed, required, in_order)
        self.options = {label: table[o] for label, o in problem.operators.items()}
        for o in problem.operators.values():
            self.operator(o)
        readers: dict[Tensor, list[Edge]] = defaultdict(list)
        for edge in problem.edges:
            readers[edge.tensor].append(edge)
        for tensor, edges in readers.items():
            self.tensor(tensor, edges)
        for tensor in problem.outputs:
            layouts = self.options[tensor[0]].outputs[tensor[1]]
            self.network.add(
                tensor[0], self.move(tensor, layouts, np.zeros((1, layouts.shape[1]), dtype=int), FORWARD)[:, 0]
            )

    def choose(
        self,
        memory_price: float = 0.0,
        seconds: float = 60.0,
        only: Mapping[str, int] | None = None,
        close: float = CLOSE,
        work: WorkClock | None = None,
    ) -> Solution:
        """The cheapest choices.

        memory_price: seconds per byte, the multiplier of the memory constraint.
        seconds: budget of nominal seconds of work (`plan.network.work`).
        only: fixed options, by label.
        close: relative gap that is accepted.

        Raises ValueError if no combination of choices is possible.
        """
        network = self.network.copy()
        if memory_price:
            self.memory.charge(network, memory_price)
        for label, option in (only or {}).items():
            network.add(label, np.where(np.arange(len(self.options[label])) == option, 0.0, NEVER))
        solution = minimize(network, seconds, close, work)
        choices = {label: dict(options.choices[solution.states[label]]) for label, options in self.options.items()}
        memory, charged = self.memory.total(solution.states)
        seconds = solution.cost - memory_price * charged
        return Solution(
            choices, solution.cost, solution.bound, solution.gap, memory, seconds, memory_price, solution.states
        )

    def costs(self, chosen: Solution) -> dict[str, Cost]:
        """The cost of each operator and input on a rank, by label, including the moves of its operands."""
        network, x = self.network, chosen.states
        moved: Counter[str] = Counter()
        for u, v in network.edges():
            moved[self.payer(u, v)] += network.pairs[u][v][x[u], x[v]]
        stored: Counter[str] = Counter()
        activations: Counter[str] = Counter()
        tables = self.memory
        for table, sums in ((tables.inputs, stored), (tables.gradients, stored), (tables.activations, activations)):
            for name, states in table.items():
                sums[self.hubs[name][0][0] if name in self.hubs else name] += states[x[name]]
        cost_of = {}
        for label, o in self.problem.operators.items():
            runs = o.count * self.runs.get(o.phase, 1)
            moves = moved[label] / runs
            cost_of[label] = Cost(network.unary[label][x[label]] / runs + moves, stored[label] / o.count,
                                activations[label] / o.count, moves)  # fmt: skip
        return cost_of

    def payer(self, u: str, v: str) -> str:
        """The operator that a move between two variables is charged to: the reader."""
        hubs = [name for name in (u, v) if name in self.hubs]
        if hubs:
            (tensor, reader), other = self.hubs[hubs[-1]], u if hubs[-1] == v else v
            return reader if other == tensor[0] or other in self.hubs else other
        return u if self.problem.operators[v].is_input else v

    def operator(self, o: Operator) -> None:
        options = self.options[o.label]
        key = id(options), o.signature  # `self.options` keeps the options, so that ids are not reused
        if key not in self.compute_prices:
            self.compute_prices[key] = np.array([self.pricer.compute(o, choices) for choices in options.choices])
        self.network.add(o.label, self.compute_prices[key] * (o.count * self.runs.get(o.phase, 1)))
        if o.is_input:
            self.memory.keep(self.memory.inputs, o.label, o.count * o.outputs[0].bytes, options.outputs[0])
        if o.workspace and self.pricer.whole:  # forward and backward pass are in one Program
            self.memory.keep_workspace(o.label, o.count * o.workspace, options.choices, self.pricer.mesh)

    def tensor(self, tensor: Tensor, edges: list[Edge]) -> None:
        """Connect the maker of a tensor with all its readers."""
        phases: dict[str, list[Edge]] = defaultdict(list)
        for edge in edges:
            phases[self.phase(edge)].append(edge)
        source, produced = tensor[0], self.options[tensor[0]].outputs[tensor[1]]
        weight = min(self.problem.operators[source].count, sum(self.problem.edges[e] for e in edges))
        maker = self.problem.operators[source]
        # The backward pass keeps what it reads. It keeps the operand of a view, which has no memory of its own.
        saved = any(self.saves(e) or self.phase(e) == BACKWARD for e in edges)
        saved = saved and maker.phase == FORWARD and not maker.is_input and maker.bytes
        size = weight * maker.outputs[tensor[1]].bytes
        if self.together and tensor in self.problem.handed_on and maker.bytes:
            self.memory.keep(self.memory.gradients, source, size, produced)
        if len(edges) > 1:
            layouts = _unique([produced, *(self.read(edge) for edge in edges)])
            several = len(phases) > 1
            saved_moves = size * (bool(maker.is_input) and any(map(self.saves, edges)))
            source, produced = self.hub(tensor, "", (source, produced), layouts, weight, _first(phases), saved_moves,
                                    edges[0].reader, gathers=not several)  # fmt: skip
            if saved:
                self.memory.keep(self.memory.activations, source, size, produced)
            for phase, group in phases.items():
                if several and len(group) > 1:
                    as_moved = size * any(map(self.saves, group))
                    hub = self.hub(tensor, phase, (source, produced), layouts, weight, phase, as_moved, group[0].reader)
                    for edge in group:
                        self.edge(edge, *hub)
                else:
                    for edge in group:
                        self.edge(edge, source, produced)
        else:
            if saved:
                self.memory.keep(self.memory.activations, source, size, produced)
            self.edge(edges[0], source, produced)

    def hub(
        self, tensor: Tensor, name: str, source, layouts, weight: int, phase: str, saved: int, reader: str,
        gathers: bool = True,
    ):  # fmt: skip
        """A variable for the layout of a tensor; returns its name and states. held: bytes of moves that views keep."""
        hub = f"{tensor[0]} [{tensor[1]}] {name}"
        costs = weight * self.runs.get(phase, 1) * self.move(tensor, source[1], layouts, phase)
        if not gathers:
            costs = np.where(self.moves[FORWARD].gathers(source[1], layouts), NEVER, costs)
        self.hubs[hub] = tensor, reader
        self.network.add(hub, np.zeros(len(layouts)))
        self.network.join(source[0], hub, np.minimum(costs, NEVER))
        self.version(tensor, source[0], hub, saved, source[1], layouts)
        return hub, layouts

    def version(
        self, tensor: Tensor, source: str, reader: str, saved: int, produced: np.ndarray, read: np.ndarray
    ) -> None:
        """Count the result of a move between two variables."""
        self.memory.version(
            source, reader, saved, self.problem.operators[tensor[0]].outputs[tensor[1]].bytes, produced, read
        )

    def saves(self, edge: Edge) -> bool:
        return edge.operand >= 0 and edge.reader in self.saved_views

    def edge(self, edge: Edge, source: str, produced: np.ndarray) -> None:
        maker, phase = self.problem.operators[edge.tensor[0]], self.phase(edge)
        weight = min(maker.count, self.problem.edges[edge])
        costs = weight * self.runs.get(phase, 1) * self.move(edge.tensor, produced, self.read(edge), phase)
        self.network.join(source, edge.reader, np.minimum(costs, NEVER))
        saved = weight * maker.outputs[edge.tensor[1]].bytes * self.saves(edge)
        self.version(edge.tensor, source, edge.reader, saved, produced, self.read(edge))

    def read(self, edge: Edge) -> np.ndarray:
        """The layouts in which the reader reads the tensor. The successor of an input has the layout of the input."""
        options = self.options[edge.reader]
        return options.outputs[0] if edge.operand < 0 else options.inputs[edge.operand]

    def phase(self, edge: Edge) -> str:
        return UPDATE if edge.operand < 0 else self.problem.operators[edge.reader].phase

    def move(self, tensor: Tensor, source: np.ndarray, target: np.ndarray, phase: str) -> np.ndarray:
        """Prices of the moves from each state of one to each of the other, computed once per distinct layout."""
        size = self.problem.operators[tensor[0]].outputs[tensor[1]].bytes
        kind = UPDATE if phase == UPDATE else FORWARD
        key = kind, source.shape, source.tobytes(), target.shape, target.tobytes(), size  # readers often have the same
        if key not in self.move_prices:
            sources, which = np.unique(source, axis=0, return_inverse=True)
            targets, whither = np.unique(target, axis=0, return_inverse=True)
            table = self.moves[kind].table(sources, targets, size)
            self.move_prices[key] = table[which.ravel()[:, None], whither.ravel()[None, :]]
        return self.move_prices[key]


def _saved_views(problem: Problem) -> set[str]:
    """Views of the forward pass that the backward pass reads. Their operands are kept until then."""
    saving: set[str] = set()
    views = {label for label, o in problem.operators.items() if o.phase == FORWARD and not (o.is_input or o.bytes)}
    todo = [e.tensor[0] for e in problem.edges if problem.operators[e.reader].phase != FORWARD]
    makers = defaultdict(list)
    for edge in problem.edges:
        makers[edge.reader].append(edge.tensor[0])
    while todo:
        label = todo.pop()
        if label in views and label not in saving:
            saving.add(label)
            todo += makers[label]
    return saving


def _unique(layouts: list[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(layouts), axis=0)


def _first(phases: Mapping[str, list[Edge]]) -> str:
    return next(phase for phase in (FORWARD, BACKWARD, UPDATE) if phase in phases)
