"""Tracing a step until it is known that one graph stands for what its Python code does.

Each attempt runs the code on fake tensors. Several are made only where a first one has seen a reason: forward changed
Python state, drew Python random numbers, or branched on values that depend on parameters (`tracing.decisions`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tutti import compat
from tutti.ir.step_graph import CHECK
from tutti.ir.values import base_of, written_operands
from tutti.tracing.both_ways import BRANCH, CONDITION, BothWays, Unlike
from tutti.tracing.decisions import Decisions, Endless, Site
from tutti.tracing.input_free import InputFree, line
from tutti.tracing.snapshot import Snapshot
from tutti.tracing.trace import Refused, Traced, last_node, trace, written_since

PASSED_ON = (Refused, Unlike, Endless, *compat.ValuesNeeded)  # errors that no other way of a branch mends
MOST_SITES = 64  # branches that are looked into


class StateFound(Exception):
    """Plain tensor attributes turn out to be state. paths: where they are in the model."""

    def __init__(self, paths: set[str]):
        self.paths = paths


class Attempts:
    """function: returns named outputs; `function.autograd` is how many autograd nodes it has made. roots: objects whose
    Python state it may change. known: see `trace`.

    After `traced()`: results, the names of outputs; checks, what fails by the name of an output.
    """

    def __init__(self, function: Any, args: tuple[torch.Tensor, ...],
                 known: Mapping[int, torch.Tensor], roots: Sequence[Any], decisions: Decisions):  # fmt: skip
        self.function, self.args, self.known, self.roots, self.decisions = function, args, known, roots, decisions
        self.results: list[str] = []
        self.checks: dict[str, str] = {}
        self.whole: list[Site] = []  # with `and` or `or` that cannot be rewritten, or is not theirs

    def traced(self) -> Traced:
        """The graph; the Python state of `roots` is as before, whatever happens.

        Raises StateFound for tensor attributes that forward reads and replaces, ValueError where the graph depends on
        other Python state that forward changes, on Python's random numbers, or on values that only a run knows.
        """
        snapshot = Snapshot(self.roots)
        with BothWays(last_node, written_since, self.roots) as both_ways:
            while True:
                try:
                    return self._traced(snapshot)
                except Compound as compound:
                    if not both_ways.rewrite(compound.site, CONDITION):
                        self.whole.append(compound.site)
                except Branches as branches:
                    if not both_ways.rewrite(branches.site, BRANCH):
                        raise
                except Unlike as error:
                    assert both_ways.last is not None
                    raise Branches(both_ways.last, error) from error
                self.decisions.forget()
                self.checks.clear()

    def _traced(self, snapshot: Snapshot) -> Traced:
        try:
            made = self._first(snapshot)
            self.names, self.autograd, sites = self.results, self.function.autograd, list(self.decisions.conditions)
            if late := [site for site in self.decisions.conditions if site in self.decisions.late]:
                raise Branches(late[0], ValueError("it is asked for in the backward pass"))
            self._find_state(snapshot, made)
            changes = {p: (old, new) for p, (old, new) in snapshot.changes().items() if not _stands_in(new)}
            if changes := changes | snapshot.filled():
                self._compare_with_next_call(made, changes)
            if drawn := snapshot.random_was_drawn:
                snapshot.restore()
                self._compare_with_other_numbers(made, drawn, snapshot)
            for site in sites:
                if site.is_compound and site not in self.whole:
                    raise Compound(site)
            for number, site in enumerate(sites):
                snapshot.restore()
                if failure := self._other_way(made, site):
                    self.checks[f"{CHECK}:{number}"] = f"{site}: {failure}"
            self.results = self._without_other_checks(made, self.names)
            return made
        finally:
            snapshot.restore()

    def _run(self, forward_only: bool = False, after: Traced | None = None) -> Traced:
        self.decisions.begin()

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = self.function(*tensors, forward_only=forward_only)
            self.results = list(outputs)
            return tuple(outputs.values())

        return trace(flat, *self.args, known=self.known, decisions=self.decisions, after=after)

    def _first(self, snapshot: Snapshot) -> Traced:
        """A first graph: where the code raises behind a branch, the other way is taken."""
        while True:
            try:
                return self._run()
            except PASSED_ON:
                raise
            except Exception:
                last = self.decisions.asked[-1] if self.decisions.asked else None
                if last is None or self.decisions.taken[last] or len(self.decisions.taken) > MOST_SITES:
                    raise
                self.decisions.taken[last] = True
            snapshot.restore()

    def _find_state(self, snapshot: Snapshot, made: Traced) -> None:
        """Raise StateFound for tensors that are read and then replaced, or written into."""
        constants = {id(x) for x in made.constants.values()}
        written = {id(made.constants[str(x.target)]) for node in made.graph.nodes for x in _constants_written(node)}
        changes = snapshot.changes().items()
        replaced = [(path, old) for path, (old, new) in changes if isinstance(new, torch.Tensor)]
        paths = {path for path, old in replaced if isinstance(old, torch.Tensor) and id(old) in constants}
        held = {id(x): path for path, x in snapshot.tensors()}
        paths |= {held[x] for x in written if x in held}
        if unknown := written - held.keys():
            shape = next(tuple(x.shape) for x in made.constants.values() if id(x) in unknown)
            raise ValueError(
                f"forward writes into a tensor of shape {shape} that is no attribute of a module of the model; make it "
                "a buffer (register_buffer), which is state of the step"
            )
        if paths:
            raise StateFound(paths)

    def _compare_with_next_call(self, made: Traced, changes: Mapping[str, tuple[Any, Any]]) -> None:
        """ValueError where a second call of the code, from what the first one left, gives another graph."""
        path, (old, new) = min(changes.items(), key=lambda change: isinstance(change[1][1], torch.Tensor))
        if not self._is_like(made, after=made):
            raise ValueError(
                f"what the model computes depends on Python state that its forward changes: {path!r} was {_shown(old)} "
                f"before the call and {_shown(new)} after it. A step is captured once: make it a buffer "
                "(register_buffer) and compute with tensors, or set it outside of forward"
            )

    def _compare_with_other_numbers(self, made: Traced, drawn: Sequence[str], snapshot: Snapshot) -> None:
        """ValueError where other random numbers of Python give another graph."""
        for seed in (1, 2):
            snapshot.reseed(seed)
            if not self._is_like(made):
                raise ValueError(
                    f"the model draws numbers from {drawn[0]}, and what it computes depends on them. A step is "
                    "captured once: draw with torch.rand, or pass the numbers with the batch"
                )

    def _other_way(self, made: Traced, site: Site) -> str | None:
        """What the code raises where it goes the other way at a site; None where that makes no difference."""
        known = set(self.decisions.taken)
        self.decisions.taken[site] = not self.decisions.taken[site]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same = self._is_like(made) and self.decisions.conditions.keys() <= known
        except (Unlike, Endless):
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.decisions.taken[site] = not self.decisions.taken[site]
        if not same:
            raise Branches(site)
        return None

    def _is_like(self, made: Traced, after: Traced | None = None) -> bool:
        """Whether the forward pass gives the same graph once more, but for conditions; not where it gives none.

        after: the trace whose call has left tensors that are read now.
        """
        try:
            other = self._run(forward_only=not self.function.backward_matters, after=after)
        except (Refused, *compat.ValuesNeeded):
            return False
        kept = [name for name in self.results if not name.startswith(f"{CHECK}:")]
        (theirs,), (ours,) = (x.graph.find_nodes(op="output") for x in (made, other))
        if self.function.autograd != self.autograd:
            return False
        before = written_out(made, [theirs.args[0][self.names.index(name)] for name in kept])
        return before == written_out(other, [ours.args[0][self.results.index(name)] for name in kept])

    def _without_other_checks(self, made: Traced, results: list[str]) -> list[str]:
        """Drop the outputs of conditions that are no checks; the names that are left."""
        kept = [i for i, name in enumerate(results) if not name.startswith(f"{CHECK}:") or name in self.checks]
        (output,) = made.graph.find_nodes(op="output")
        output.args = (tuple(output.args[0][i] for i in kept),)
        return [results[i] for i in kept]


class Compound(Exception):
    """A condition with `and` or `or` decides before it is known as a whole."""

    def __init__(self, site: Site):
        self.site = site


class Branches(ValueError):
    """A line at which the model computes one thing or another by values that depend on parameters."""

    def __init__(self, site: Site, why: Exception | None = None):
        self.site = site
        super().__init__(
            f"{site}: the model branches on the values of a tensor that depends on parameters, and the two ways "
            f"compute different things{f' ({why})' if why else ''}. A step is captured once for all values: write "
            "torch.where or a mask for an if. On one device tutti.jit(model) runs it as it is, and its report() lists "
            "all such places"
        )


def written_out(traced: Traced, results: Sequence[fx.Node]) -> str:
    """What results are made of as text: the same for equal graphs, wherever they make what depends on no input."""
    free = InputFree(traced.graph, traced.constants)
    (output,) = traced.graph.find_nodes(op="output")
    names: dict[fx.Node, str] = {}
    lines = []
    for node in _needed(traced.graph, results):
        if free.calls(node) is not None:
            continue
        operands = {x: free.text(x, node) or names[x] for x in node.all_input_nodes}
        names[node] = str(len(names))
        lines.append(line(node, operands, traced.constants))
    return "\n".join([*lines, str([free.text(x, output) or names[x] for x in results])])


def _needed(graph: fx.Graph, results: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes on which results depend, with those before them that write into tensors, in order."""
    needed: set[fx.Node] = set()
    behind, wanted = True, set(results)
    for node in reversed(graph.nodes):
        behind = behind and node not in wanted
        if node in wanted or (not behind and (node in needed or written_operands(node))):
            needed |= {node, *node.all_input_nodes}
    return [node for node in graph.nodes if node in needed]


def _constants_written(node: fx.Node) -> list[fx.Node]:
    return [x for x in map(base_of, written_operands(node)) if x.op == "get_attr"]


def _stands_in(value: Any) -> bool:
    """Whether a value holds nothing but parameters' stand-ins, as the weights that an LSTM collects."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_stands_in, value))
    value = value() if isinstance(value, weakref.ref) else value
    return isinstance(value, nn.Parameter) and isinstance(value, compat.FakeTensor)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value) if not str(value).startswith("<object object") else "not there"
    return text if len(text) <= 60 else text[:57] + "..."
