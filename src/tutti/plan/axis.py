"""The choices of one mesh axis for all operators at once, as an integer program.

For every operator o let x[o,s] in {0,1} say that option s (a `Choice`, or None for computing it whole) is taken:

    sum_s x[o,s] = 1                                                                        `_Program.operator`

For every edge e from tensor t to operand i, y[e,p,q] >= 0 is the flow from the placement p in which t is made to the
placement q in which it is read. Both ends must agree with the options there:

    sum_q y[e,p,q] = sum_{s makes t as p} x[maker,s]        sum_p y[e,p,q] = sum_{s reads i as q} x[reader,s]
                                                                                            `_Program.edge`
A reshard that several readers share is paid once: z[t,p,q] >= y[e,p,q] for each of them.   `_Program.edge`

    minimize  sum cost[o,s] x[o,s] + sum price[t,p,q] z[t,p,q]

in seconds: `cost` is the time of the operator on its local part, `price` that of the collective. Repeated layers are
folded beforehand (`Problem`), so the size of the program does not grow with depth. Its relaxation is nearly always
integral; HiGHS closes what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tutti.plan.choice import Choice, input_placement, output_placement
from tutti.plan.layout import Partial, Placement, R, Split
from tutti.plan.problem import Edge, Operator, Problem, Tensor

Option = Choice | None
Options = Mapping[str, list[Option]]

UNIT = 1e6  # the solver works in microseconds


@dataclass(frozen=True)
class Prices:
    """What the program minimizes, in seconds; reshard returns None for what cannot be done."""

    compute: Callable[[Operator, Option], float]
    reshard: Callable[[Tensor, Placement, Placement], float | None]


def solve(problem: Problem, options: Options, prices: Prices, time_limit: float = 60.0) -> dict[str, Option]:
    """The cheapest option of every operator. Raises ValueError where no combination is possible."""
    program = _Program(problem, options, prices)
    for label in problem.operators:
        program.operator(label)
    sharing: dict[Tensor, int] = {}
    for edge in problem.edges:
        sharing[edge.tensor] = sharing.get(edge.tensor, 0) + 1
    for edge in problem.edges:
        program.edge(edge, shared=sharing[edge.tensor] > 1)
    for tensor in problem.outputs:
        program.edge(Edge(tensor, "", 0), shared=False)
    return program.minimum(time_limit)


def kind_of(source: Placement, target: Placement) -> str | None:
    """The collective between two placements along one axis; "" where nothing is sent, None where there is none."""
    if source == target or (source == R and not (isinstance(target, Partial) and target.op != "sum")):
        return ""
    if isinstance(source, Split):
        return "all_to_all" if isinstance(target, Split) else "all_gather"
    if isinstance(source, Partial) and not isinstance(target, Partial):
        return "reduce_scatter" if isinstance(target, Split) else "all_reduce"
    return None


class _Program:
    def __init__(self, problem: Problem, options: Options, prices: Prices):
        self.problem, self.options, self.prices = problem, options, prices
        self.cost: list[float] = []
        self.integral: list[int] = []
        self.entries: list[tuple[int, int, float]] = []  # (row, column, coefficient)
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.first: dict[str, int] = {}  # operator -> column of its first option
        self.shared: dict[tuple, int] = {}  # (tensor, p, q, phase) -> column of z

    def column(self, cost: float, integral: bool = False) -> int:
        self.cost.append(cost * UNIT)
        self.integral.append(int(integral))
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.entries += [(len(self.lower), column, coefficient) for column, coefficient in terms]
        self.lower.append(lower)
        self.upper.append(upper)

    def operator(self, label: str) -> None:
        o, options = self.problem.operators[label], self.options[label]
        columns = [self.column(self.prices.compute(o, option), integral=True) for option in options]
        self.first[label] = columns[0]
        self.row([(c, 1.0) for c in columns], 1, 1)

    def edge(self, edge: Edge, shared: bool) -> None:
        made = self._by_placement(edge.tensor[0], lambda o, s: _made(o, s, edge.tensor[1]))
        if edge.reader:
            read = self._by_placement(edge.reader, lambda o, s: _read(o, s, edge.operand))
            phase = self.problem.operators[edge.reader].phase
        else:
            read, phase = {cast(Placement, R): []}, ""  # an output, replicated
        out_of: dict[Placement, list[int]] = {p: [] for p in made}
        into: dict[Placement, list[int]] = {q: [] for q in read}
        for p in made:
            for q in read:
                price = self.prices.reshard(edge.tensor, p, q)
                if price is None:
                    continue
                if shared and price > 0:
                    y = self.column(0.0)
                    key = (edge.tensor, p, q, phase if isinstance(p, Split) else "")
                    if key not in self.shared:
                        self.shared[key] = self.column(price)
                    self.row([(self.shared[key], 1.0), (y, -1.0)], 0, np.inf)
                else:
                    y = self.column(price)
                out_of[p].append(y)
                into[q].append(y)
        for ends, flows in ((made, out_of), (read, into)):
            for placement, columns in flows.items():
                taken = ends[placement]
                if edge.reader or ends is made:
                    self.row([(c, 1.0) for c in columns] + [(c, -1.0) for c in taken], 0, 0)

    def _by_placement(self, label: str, placement: Callable) -> dict[Placement, list[int]]:
        o, found = self.problem.operators[label], {}
        for i, option in enumerate(self.options[label]):
            found.setdefault(placement(o, option), []).append(self.first[label] + i)
        return found

    def minimum(self, time_limit: float) -> dict[str, Option]:
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self.lower), len(self.cost)))
        result = milp(
            np.array(self.cost),
            integrality=np.array(self.integral),
            bounds=Bounds(0, np.inf),
            constraints=LinearConstraint(matrix, self.lower, self.upper),  # pyright: ignore[reportArgumentType]
            options={"time_limit": time_limit, "mip_rel_gap": 1e-4},
        )
        if result.x is None:
            raise ValueError(f"no combination of choices is possible ({result.message})")
        return {
            label: options[int(np.argmax(result.x[self.first[label] : self.first[label] + len(options)]))]
            for label, options in self.options.items()
        }


def _made(o: Operator, option: Option, output: int) -> Placement:
    return output_placement(o.rule, option, output) if option else R


def _read(o: Operator, option: Option, operand: int) -> Placement:
    if operand < 0:  # the successor of an input lies as the input does
        return _made(o, option, 0)
    return input_placement(o.rule, option, operand) if option else R
