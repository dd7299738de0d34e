"""The planner: textbook meshes of every shape, layouts per operator by cost, and the fastest of those that fit.

For one mesh the choices are found axis by axis (`plan.axis`), each as an integer program under the rule that gives
the axis its name (`plan.textbook`): along `dp` the batch is split and parameters are used whole; along `tp` every
matrix is split and used where it lies. Then the ZeRO stage lays out what is kept between steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from math import gcd

from tutti.cluster import Cluster
from tutti.graph.costs import FLOPS
from tutti.graph.step_graph import UPDATE, StepGraph
from tutti.plan.axis import Option, Prices, kind_of, solve
from tutti.plan.choice import Choice, candidates, fits, layouts, nest
from tutti.plan.estimate import Estimator
from tutti.plan.explain import seconds, size
from tutti.plan.layout import Layout, Split
from tutti.plan.pin import Pin, resolve
from tutti.plan.plan import Plan
from tutti.plan.price import Pricer, with_choice
from tutti.plan.problem import Operator, Tensor, problem_of
from tutti.plan.textbook import Textbook, parse_name
from tutti.rules import source

PENALTY = 1.0  # seconds: a parameter split over tp is gathered only where there is no other way
NOT_STATE = ("param", "buffer", "batch", "lr", "step", "seed", "constant", "grad")


class Planner:
    """Plans for one graph on one cluster."""

    def __init__(self, step: StepGraph, cluster: Cluster, pins: Iterable[Pin] = (), accumulate: int = 1):
        self.step, self.cluster, self.accumulate = step, cluster, accumulate
        self.problem = problem_of(step)
        if self.problem.without_rule and cluster.size > 1:
            names = ", ".join(self.problem.without_rule)
            warnings.warn(f"no rule says how to split {names}: computed whole on every device", stacklevel=4)
        self.pins = resolve(pins, step)
        self.from_batch = self.problem.reached_from("batch")
        params = {label for label, o in self.problem.operators.items() if o.kind == "param"}
        views = self.problem.reached_from("param") - self.from_batch
        self.weights = params | {v for v in views if self.problem.operators[v].phase != UPDATE}
        self.estimator = Estimator(step, self.problem, cluster, accumulate)
        self._computed: dict[tuple, dict[str, dict[str, Choice]]] = {}  # by axis sizes and stored layouts

    def named(self, name: str) -> Plan:
        """A textbook plan by its name, which it keeps (`zero3`, not `dp8xzero3`). See `plan.textbook`."""
        book = parse_name(name, self.cluster.size)
        without_effect = "zero" in name and not book.zero  # on a single data-parallel device
        return self.textbook(book).replace(name=str(book) if without_effect else name)

    def textbook(self, book: Textbook, stored: Mapping[str, Layout] | None = None) -> Plan:
        """The textbook plan with the cheapest choices.

        stored: layouts of inputs that are given already, by label (to evaluate with the parameters as they lie).
        """
        self._check_pins(book)
        stored = stored or {}
        key = (book.dp, book.tp, frozenset(stored.items()))
        if key not in self._computed:
            self._computed[key] = self._compute(book, stored)
        taken = {label: dict(choices) for label, choices in self._computed[key].items()}
        if book.dp > 1:
            found = self._solve(book, "dp", taken, _Zero(self, book, taken, stored))
            for label, option in found.items():
                taken[label] = with_choice(taken[label], "dp", option)
        return self._plan(book, taken)

    def best(self, ranked: list[Plan] | None = None) -> Plan:
        """The fastest of all textbook plans that fit in memory, with the reasons. ranked: all plans, where known."""
        plans = ranked or self.ranked()
        memory = self.cluster.device.memory
        fitting = [p for p in plans if p.prediction.peak_bytes <= memory]  # pyright: ignore
        if not fitting:
            least = plans[0]
            raise ValueError(
                f"no plan fits into {size(memory)} per device on {self.cluster}: the smallest, {least.name}, "
                f"needs {size(least.prediction.peak_bytes)}; use more devices or a smaller batch"  # pyright: ignore
                + "".join(f"; {reason}" for reason in self._left_out())
            )
        return fitting[0].replace(reasons=_reasons(fitting, plans, memory) + self._left_out() + fitting[0].reasons)

    def ranked(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Plan]:
        """All textbook plans: those that fit in memory by time, then the others by memory.

        progress: told how many of how many plans are made.
        """
        plans, books = [], self._books()
        for i, book in enumerate(books):
            progress(i, len(books))
            plans.append(self.textbook(book))
        progress(len(books), len(books))

        def rank(plan: Plan) -> tuple[bool, float]:
            made = plan.prediction
            assert made is not None
            too_large = made.peak_bytes > self.cluster.device.memory
            return too_large, made.peak_bytes if too_large else made.step_seconds

        return sorted(plans, key=rank)

    def _books(self) -> list[Textbook]:
        """Every dp x tp of the devices that divides the batch and has the pinned axes, with every ZeRO stage."""
        n, books, batch = self.cluster.size, [], self._batch()
        stages = (0, 1, 2, 3) if self.accumulate > 1 else (0, 1, 3)  # 2 differs only in what is accumulated
        for tp in (t for t in range(1, n + 1) if n % t == 0 and batch % (n // t) == 0):
            books += [Textbook(n // tp, tp, zero) for zero in (stages if n > tp else (0,))]
        pinned = {axis for axes in self.pins.values() for axis in axes}
        kept = [book for book in books if pinned <= set(book.mesh)]
        if not kept:
            raise ValueError(
                f"no mesh of {n} devices has all the axes that pins name, {sorted(pinned)}; there are 'dp' and 'tp'"
            )
        return kept

    def _batch(self) -> int:
        """What a number of data-parallel devices has to divide."""
        specs = [node.meta["val"] for name, node in self.step.inputs.items() if name.startswith("batch:")]
        return gcd(*(spec.shape[0] for spec in specs if spec.shape))

    def _left_out(self) -> tuple[str, ...]:
        """Which data-parallel plans are none because of the batch."""
        n, batch = self.cluster.size, self._batch()
        sizes = [str(dp) for dp in range(2, n + 1) if n % dp == 0 and batch % dp]
        if not sizes:
            return ()
        what = "microbatch" if self.accumulate > 1 else "batch"
        return (
            f"left out dp {', '.join(sizes)}: a {what} of {batch} does not divide over so many devices, "
            f"one of {-(-batch // n) * n} would",
        )

    def _check_pins(self, book: Textbook) -> None:
        for label, axes in self.pins.items():
            for axis in axes:
                if axis not in book.mesh:
                    raise ValueError(f"the pin on {label!r} names axis {axis!r}; the mesh has {list(book.mesh)}")

    def _compute(self, book: Textbook, stored: Mapping[str, Layout]) -> dict[str, dict[str, Choice]]:
        """Choices of forward and backward along dp, then of everything along tp."""
        taken: dict[str, dict[str, Choice]] = {label: {} for label in self.problem.operators}
        for axis, role in (("dp", _Data), ("tp", _Tensor)):
            if axis in book.mesh and book.mesh[axis] > 1:
                found = self._solve(book, axis, taken, role(self, book, taken, stored))
                for label, option in found.items():
                    taken[label] = with_choice(taken[label], axis, option)
        return taken

    def _solve(self, book: Textbook, axis: str, taken, role: _Role) -> dict[str, Option]:
        pricer, problem, mesh = Pricer(self.cluster, book.mesh), self.problem, book.mesh
        k = mesh[axis]

        def compute(o: Operator, option: Option) -> float:
            return o.count * pricer.compute(o, with_choice(taken[o.label], axis, option))

        def price(tensor: Tensor, source, target) -> float | None:
            kind = kind_of(source, target)
            if not kind:
                return None if kind is None else 0.0
            others = {a: c for a, c in taken[tensor[0]].items() if a != axis}
            o = problem.operators[tensor[0]]
            local = pricer.made_bytes(o, tensor[1], others) // (k if isinstance(source, Split) else 1)
            return o.count * (pricer.collective(kind, axis, local) + role.moving(o))

        options = {label: role.options(o) for label, o in problem.operators.items()}
        return solve(problem, options, Prices(compute, price))

    def _plan(self, book: Textbook, taken: Mapping[str, Mapping[str, Choice]]) -> Plan:
        inputs, operators = {}, {}
        for label, choices in taken.items():
            o = self.problem.operators[label]
            if choices and o.is_input:
                inputs[label] = layouts(o.rule, choices)[1][0]
            elif choices:
                operators[label] = dict(choices)
        if self.accumulate > 1:
            inputs |= self._accumulators(book, taken)
        plan = Plan(book.mesh, inputs, operators, self.accumulate, str(book), self.step.fingerprint, str(self.cluster))
        return plan.replace(prediction=self.estimator.predict(plan), reasons=self._without_rule())

    def _without_rule(self) -> tuple[str, ...]:
        """Which operators run whole on every device because no rule says how to split them."""
        if not self.problem.without_rule or self.cluster.size == 1:
            return ()
        return (f"computed whole on every device, for want of a rule: {', '.join(self.problem.without_rule)}",)

    def _accumulators(self, book: Textbook, taken: Mapping[str, Mapping[str, Choice]]) -> dict[str, Layout]:
        """How gradients lie between microbatches: as they are made, or from ZeRO-2 on as the update reads them."""
        found = {}
        for name in self.step.gradient_names:
            maker, index = source(self.step.outputs[name])
            label = maker.meta["label"]
            layout = layouts(self.problem.operators[label].rule, taken[label])[1][index]
            if book.zero >= 2:
                readers = [e for e in self.problem.edges if e.tensor == (label, index) and e.operand >= 0]
                updates = [e for e in readers if self.problem.operators[e.reader].phase == UPDATE]
                read = [layouts(self.problem.operators[e.reader].rule, taken[e.reader])[0][e.operand] for e in updates]
                layout = max(read, key=lambda at: len(at.splits), default=layout)
            found[self.step.gradient_label(name.removeprefix("grad:"))] = layout
        return {label: layout for label, layout in found.items() if layout != Layout()}


class _Role:
    """What an axis may do, by the kind of operator."""

    axis = ""

    def __init__(self, planner: Planner, book: Textbook, taken, stored: Mapping[str, Layout]):
        self.planner, self.mesh, self.taken, self.stored, self.book = planner, book.mesh, taken, stored, book

    def free(self, o: Operator) -> list[Option]:
        """Everything that is legal beside what other axes do."""
        found: list[Option] = [None]
        others = {a: c for a, c in self.taken[o.label].items() if a != self.axis}
        for choice in candidates(o.rule, self.planner.problem.cuts[o.label], self.mesh[self.axis]):
            nested = nest(choice, others, self.mesh)
            if not (o.is_input and choice.linear) and fits(o.rule, {**others, self.axis: nested}, self.mesh):
                found.append(nested)
        return found

    def given(self, o: Operator) -> list[Option] | None:
        """The option of an input that is pinned, or stored already."""
        pinned = self.planner.pins.get(o.label, {}).get(self.axis)
        placement = self.stored[o.label][self.axis] if o.label in self.stored else pinned
        if placement is None:
            return None
        if not isinstance(placement, Split):
            return [None]
        choice = Choice(o.rule.outputs[0][placement.dim][0], placement.outer)
        if not fits(o.rule, {**self.taken[o.label], self.axis: choice}, self.mesh):
            raise ValueError(f"{o.label} of shape {o.outputs[0].shape} cannot be split at dim {placement.dim} over "
                             f"{self.mesh[self.axis]} devices of axis {self.axis!r}")  # fmt: skip
        return [choice]

    def options(self, o: Operator) -> list[Option]:
        raise NotImplementedError

    def split(self, o: Operator) -> list[Option]:
        """As `free`, but not whole where the operator can be split."""
        options = self.free(o)
        return options[1:] or options

    def moving(self, o: Operator) -> float:
        return 0.0


class _Data(_Role):
    """dp: the batch is split, with all that is computed from it; parameters are whole."""

    axis = "dp"

    def options(self, o: Operator) -> list[Option]:
        if o.kind == "batch" and o.outputs[0].shape:
            size, k = o.outputs[0].shape[0], self.mesh[self.axis]
            if size % k:
                raise ValueError(f"{o.label}: a batch of {size} does not divide over {k} data-parallel devices")
            return [Choice(o.rule.outputs[0][0][0])]
        if o.kind == "buffer":
            return self.given(o) or [None]
        if o.is_input or o.phase == UPDATE:
            return [None]
        return self.split(o) if o.label in self.planner.from_batch else self.free(o)


class _Tensor(_Role):
    """tp: matrices are split and used where they lie; the batch comes whole."""

    axis = "tp"

    def options(self, o: Operator) -> list[Option]:
        if not o.is_input:
            return self.split(o) if o.target in FLOPS else self.free(o)
        if o.kind in ("batch", "lr", "step", "seed", "constant"):
            return [None]
        if o.kind == "buffer":
            return self.given(o) or [None]
        is_matrix = o.kind == "param" and len(o.outputs[0].shape) > 1
        return self.given(o) or (self.split(o) if is_matrix else self.free(o))

    def moving(self, o: Operator) -> float:
        return PENALTY if o.label in self.planner.weights else 0.0


class _Zero(_Role):
    """The update along dp: what is kept between steps is split by the ZeRO stage; all else is decided already."""

    axis = "dp"

    def options(self, o: Operator) -> list[Option]:
        if o.is_input and o.kind not in NOT_STATE:
            return self.given(o) or (self.storage(o) if self.book.zero >= 1 else [None])
        if o.kind == "param":
            return self.given(o) or (self.storage(o) if self.book.zero == 3 else [None])
        if o.phase == UPDATE and not o.is_input:
            return self.free(o) if self.book.zero else [None]
        if self.book.zero == 3 and o.label in self.planner.weights:
            return self.split(o)  # a view of a weight lies as the weight does, so that it is gathered for each use anew
        return [self.taken[o.label].get(self.axis)]

    def storage(self, o: Operator) -> list[Option]:
        """The first dim that divides, inside of what tp has split."""
        others = {a: c for a, c in self.taken[o.label].items() if a != self.axis}
        for dim in o.rule.outputs[0]:
            for factor in dim:
                choice = nest(Choice(factor), others, self.mesh)
                if fits(o.rule, {**others, self.axis: choice}, self.mesh):
                    return [choice]
        return [None]


def _reasons(ranked: list[Plan], plans: list[Plan], memory: float) -> tuple[str, ...]:
    """Why the first of the ranked plans, in words."""

    def line(p: Plan) -> str:
        made = p.prediction
        assert made is not None
        return (
            f"{p.name}: {seconds(made.step_seconds)} a step ({seconds(made.communication_seconds)} communication), "
            f"peak {size(made.peak_bytes)} per device"
        )

    reasons = [f"chosen {line(ranked[0])}: the fastest of {len(plans)} plans that fits"]
    if len(ranked) > 1:
        slower = ranked[1].prediction.step_seconds / ranked[0].prediction.step_seconds  # pyright: ignore
        reasons.append(f"runner-up {line(ranked[1])}: {slower:.2f} times as slow")
    for p in plans:
        if p.prediction.peak_bytes > memory:  # pyright: ignore
            reasons.append(f"rejected {line(p)}: more than the {size(memory)} of a device")
    return tuple(reasons)


def replan(step: StepGraph, plan: Plan, cluster: Cluster) -> Plan:
    """The plan for another graph of the same model (another batch shape, evaluation): inputs lie as they do."""
    planner = Planner(step, cluster, accumulate=plan.accumulate)
    labels = {node.meta["label"] for node in step.inputs.values()}
    stored = {
        label: plan.input_layout(label) for label in labels if label.split(":")[0] not in ("batch", "seed", "step")
    }
    sharded = any("dp" in layout.splits for label, layout in stored.items() if label.startswith("param:"))
    zero = 0 if "dp" not in plan.mesh else 3 if sharded else 1
    book = Textbook(plan.mesh.get("dp", 1), plan.mesh.get("tp", 1), zero)
    if list(book.mesh.items()) == list(plan.mesh.items()):
        return planner.textbook(book, stored)
    return _carried_over(planner, plan)


def _carried_over(planner: Planner, plan: Plan) -> Plan:
    """What the plan says about the inputs and operators that this graph has too; the rest is computed whole."""
    inputs, operators = {}, {}
    for label, o in planner.problem.operators.items():
        layout, choices = plan.input_layout(label), plan.choices(label)
        if o.is_input and (o.kind != "batch" or layout.fits(o.outputs[0].shape, plan.mesh)):
            inputs[label] = layout
        elif not o.is_input and fits(o.rule, choices, plan.mesh):
            operators[label] = choices
    return plan.replace(inputs=inputs, operators=operators, graph=planner.step.fingerprint, prediction=None)
