"""Trace a step until one graph is shown to represent its Python code.

Each attempt runs the code on fake tensors. Further attempts are made only if the first one showed a reason: forward
changed Python state, drew Python random numbers, or branched on values that depend on parameters
(`tracing.trace.decisions`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tutti import compat
from tutti.ir.kind import Kind, kind_of
from tutti.ir.values import base_of, written_operands
from tutti.tracing.rewrite.input_free import InputFree, line
from tutti.tracing.trace.both_ways import BRANCH, CONDITION, BothWays, Unlike
from tutti.tracing.trace.decisions import Decisions, Endless, Site
from tutti.tracing.trace.snapshot import Snapshot
from tutti.tracing.trace.trace import Refused, Traced, last_node, trace, written_since

PASSED_ON = (Refused, Unlike, Endless, *compat.ValuesNeeded)  # errors that the other side of a branch cannot fix
MOST_SITES = 64  # maximum number of branches to trace both ways


class StateFound(Exception):
    """Plain tensor attributes turn out to be state. paths: their paths in the model."""

    def __init__(self, paths: set[str]):
        self.paths = paths


class Attempts:
    """function: returns named outputs; `function.autograd` is the number of its autograd nodes. roots: objects whose
    Python state it may change. arg_values: see `trace`.

    After `traced()`: results, the names of outputs; checks, the failure message by output name.
    """

    def __init__(self, function: Any, args: tuple[torch.Tensor, ...],
                 arg_values: Mapping[int, torch.Tensor], roots: Sequence[Any], decisions: Decisions):  # fmt: skip
        self.function, self.args, self.roots, self.decisions = function, args, roots, decisions
        self.arg_values = arg_values
        self.results: list[str] = []
        self.checks: dict[str, str] = {}
        self.whole: list[Site] = []  # conditions whose `and` or `or` cannot be rewritten

    def traced(self) -> Traced:
        """The graph. The Python state of `roots` is restored in any case.

        Raises StateFound for tensor attributes that forward reads and replaces, and ValueError if the graph depends on
        other Python state that forward changes, on Python's random numbers, or on values known only at run time.
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
            traced = self._first(snapshot)
            self.names, self.autograd, sites = self.results, self.function.autograd, list(self.decisions.conditions)
            if late := [site for site in self.decisions.conditions if site in self.decisions.late]:
                raise Branches(late[0], ValueError("the condition is evaluated in the backward pass"))
            self._find_state(snapshot, traced)
            changes = {p: (old, new) for p, (old, new) in snapshot.changes().items() if not _stands_in(new)}
            if changes := changes | snapshot.filled():
                self._compare_with_next_call(traced, changes)
            if drawn := snapshot.random_was_drawn:
                snapshot.restore()
                self._compare_with_other_numbers(traced, drawn, snapshot)
            for site in sites:
                if site.is_compound and site not in self.whole:
                    raise Compound(site)
            for number, site in enumerate(sites):
                snapshot.restore()
                if failure := self._other_way(traced, site):
                    self.checks[Kind.CHECK.at(number)] = f"{site}: {failure}"
            self.results = self._without_other_checks(traced, self.names)
            return traced
        finally:
            snapshot.restore()

    def _run(self, forward_only: bool = False, after: Traced | None = None) -> Traced:
        self.decisions.begin()

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = self.function(*tensors, forward_only=forward_only)
            self.results = list(outputs)
            return tuple(outputs.values())

        return trace(flat, *self.args, arg_values=self.arg_values, decisions=self.decisions, after=after)

    def _first(self, snapshot: Snapshot) -> Traced:
        """Trace the first graph. If the code raises after a branch, take the other side of the branch."""
        while True:
            try:
                return self._run()
            except PASSED_ON:
                raise
            except Exception:
                last = self.decisions.evaluated[-1] if self.decisions.evaluated else None
                if last is None or self.decisions.taken[last] or len(self.decisions.taken) > MOST_SITES:
                    raise
                self.decisions.taken[last] = True
            snapshot.restore()

    def _find_state(self, snapshot: Snapshot, traced: Traced) -> None:
        """Raise StateFound if the function reads a tensor and then replaces it or writes into it."""
        constants = {id(x) for x in traced.constants.values()}
        written = {id(traced.constants[str(x.target)]) for node in traced.graph.nodes for x in _constants_written(node)}
        changes = snapshot.changes().items()
        replaced = [(path, old) for path, (old, new) in changes if isinstance(new, torch.Tensor)]
        paths = {path for path, old in replaced if isinstance(old, torch.Tensor) and id(old) in constants}
        path_of = {id(x): path for path, x in snapshot.tensors()}
        paths |= {path_of[x] for x in written if x in path_of}
        if unknown := written - path_of.keys():
            shape = next(tuple(x.shape) for x in traced.constants.values() if id(x) in unknown)
            raise ValueError(
                f"forward writes into a tensor of shape {shape} that is not an attribute of a module: make it a buffer "
                "(register_buffer), so that it is state of the step"
            )
        if paths:
            raise StateFound(paths)

    def _compare_with_next_call(self, traced: Traced, changes: Mapping[str, tuple[Any, Any]]) -> None:
        """Raise ValueError if a second call, starting from the state after the first one, gives a different graph."""
        path, (old, new) = min(changes.items(), key=lambda change: isinstance(change[1][1], torch.Tensor))
        if not self._is_like(traced, after=traced):
            raise ValueError(
                f"what the model computes depends on Python state that its forward changes: {path!r} was {_shown(old)} "
                f"before the call and {_shown(new)} after it. A step is captured once: make it a buffer "
                "(register_buffer) and compute with tensors, or set it outside of forward"
            )

    def _compare_with_other_numbers(self, traced: Traced, drawn: Sequence[str], snapshot: Snapshot) -> None:
        """Raise ValueError if different Python random numbers give a different graph."""
        for seed in (1, 2):
            snapshot.reseed(seed)
            if not self._is_like(traced):
                raise ValueError(
                    f"the graph depends on random numbers that the model draws from {drawn[0]}. A step is captured "
                    "once: draw with torch.rand, or pass the numbers with the batch"
                )

    def _other_way(self, traced: Traced, site: Site) -> str | None:
        """Trace the other side of a branch. Returns the error that it raises, or None if the graph is the same."""
        conditions = set(self.decisions.taken)
        self.decisions.taken[site] = not self.decisions.taken[site]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same = self._is_like(traced) and self.decisions.conditions.keys() <= conditions
        except (Unlike, Endless):
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.decisions.taken[site] = not self.decisions.taken[site]
        if not same:
            raise Branches(site)
        return None

    def _is_like(self, traced: Traced, after: Traced | None = None) -> bool:
        """Trace the forward pass again. Returns whether the graph is the same up to conditions; False if tracing fails.

        after: the trace of the preceding call, which created the tensors that are read now.
        """
        try:
            repeated = self._run(forward_only=not self.function.backward_matters, after=after)
        except (Refused, *compat.ValuesNeeded):
            return False
        names = [name for name in self.results if kind_of(name) != Kind.CHECK]
        (theirs,), (ours,) = (x.graph.find_nodes(op="output") for x in (traced, repeated))
        if self.function.autograd != self.autograd:
            return False
        before = written_out(traced, [theirs.args[0][self.names.index(name)] for name in names])
        return before == written_out(repeated, [ours.args[0][self.results.index(name)] for name in names])

    def _without_other_checks(self, traced: Traced, results: list[str]) -> list[str]:
        """Remove the outputs of conditions that are not checks. Returns the names of the other outputs."""
        indices = [i for i, name in enumerate(results) if kind_of(name) != Kind.CHECK or name in self.checks]
        (output,) = traced.graph.find_nodes(op="output")
        output.args = (tuple(output.args[0][i] for i in indices),)
        return [results[i] for i in indices]


class Compound(Exception):
    """A condition with `and` or `or` branches before all of it is known."""

    def __init__(self, site: Site):
        self.site = site


class Branches(ValueError):
    """The model branches on values that depend on parameters, and both sides compute different things."""

    def __init__(self, site: Site, why: Exception | None = None):
        self.site = site
        super().__init__(
            f"{site}: the model branches on the values of a tensor that depends on parameters, and the two ways "
            f"compute different things{f' ({why})' if why else ''}. A step is captured once for all values: write "
            "torch.where or a mask for an if. On one device tutti.jit(model) runs it as it is, and its report() lists "
            "all such places"
        )


def written_out(traced: Traced, results: Sequence[fx.Node]) -> str:
    """The computation of results as text, equal for equal graphs. Input-free values count by what they contain."""
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
    """Return the nodes that results depend on, and earlier nodes that write into tensors, in order."""
    needed: set[fx.Node] = set()
    behind, result_set = True, set(results)
    for node in reversed(graph.nodes):
        behind = behind and node not in result_set
        if node in result_set or (not behind and (node in needed or written_operands(node))):
            needed |= {node, *node.all_input_nodes}
    return [node for node in graph.nodes if node in needed]


def _constants_written(node: fx.Node) -> list[fx.Node]:
    return [x for x in map(base_of, written_operands(node)) if x.op == "get_attr"]


def _stands_in(value: Any) -> bool:
    """Return whether a value consists of stand-ins for parameters only, such as the list of an LSTM's weights."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_stands_in, value))
    value = value() if isinstance(value, weakref.ref) else value
    return isinstance(value, nn.Parameter) and isinstance(value, compat.FakeTensor)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value) if not str(value).startswith("<object object") else "not there"
    return text if len(text) <= 60 else text[:57] + "..."
