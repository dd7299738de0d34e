"""A Program as Python code: a generator that computes, and yields its collectives.

    def run(a, b, c):
        d = mm(a, b); b = None
        e = yield Request("all_reduce", "tp", "sum", d, False, meeting); d = None
        f = mm(a, c); c = None
        g = yield Wait(e); e = None
        return f, g

The driver decides how a collective is executed: on lists of tensors in one process, or through torch.distributed. The
answer to a request is the result; if the program waits later, it is a handle that `Wait` returns. Values are dropped
after their last use.
"""

from __future__ import annotations

import linecache
import re
import weakref
from collections.abc import Callable, Collection, Generator, Mapping
from itertools import count
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from tutti.analysis.liveness import last_uses
from tutti.ir.step_graph import Call
from tutti.launch.heartbeat import Meeting
from tutti.lower.collectives import COLLECTIVES, exchange, is_begun, wait
from tutti.lower.memory.transfers import TRANSFERS
from tutti.nn.direct import DIRECT

if TYPE_CHECKING:
    from tutti.exec.stores.memory_budget import MemoryBudget
    from tutti.exec.stores.transfer_engine import TransferEngine


class Request(NamedTuple):
    """A collective that a Program requests. op: the reduction (sum, max, ...), or empty. waits: whether the program
    blocks until it is complete. meeting: what a watchdog reports about it. rows: for an exchange, the rows for each
    rank and from each rank, and the size of the buffer for the latter."""

    kind: str
    axis: str
    op: str
    tensor: torch.Tensor
    waits: bool = True
    meeting: Meeting | None = None
    rows: tuple[torch.Tensor, torch.Tensor, int] | None = None


class Wait(NamedTuple):
    """Wait for a collective that has started. begun: the answer to its request."""

    begun: Any


Run = Callable[..., Generator[Request | Wait, Any, tuple]]
Inspect = Callable[[fx.Node, Any], None]
NUMBERS = count()  # of generated sources


def generate(
    graph: fx.Graph,
    engine: TransferEngine | None = None,
    meter: Meter | None = None,
    inspect: Inspect | None = None,
    stopwatch: Stopwatch | None = None,
) -> Run:
    """The generator function of a graph. Positional arguments are its placeholders, in order; returns its outputs.

    engine: executes the transfers. meter: counts what each call needs and returns. inspect: called with each input and
    result. stopwatch: called when the Program begins and when calls end.
    """
    writer = _Writer(graph, engine, meter, inspect, stopwatch)
    source = writer.source()
    namespace = writer.globals
    name = f"<tutti program {next(NUMBERS)}>"
    exec(compile(source, name, "exec"), namespace)
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # for tracebacks and debuggers
    weakref.finalize(run := namespace["run"], linecache.cache.pop, name, None)
    return run


class Meter:
    """Counts the memory of a running Program. needs: bytes that each call allocates."""

    def __init__(self, budget: MemoryBudget, needs: Mapping[fx.Node, int]):
        self.budget, self.needs = budget, needs


class Stopwatch(NamedTuple):
    """mark: called when a Program begins, and after each of these calls."""

    mark: Callable[[], None]
    calls: Collection[fx.Node]


class _Writer:
    def __init__(
        self,
        graph: fx.Graph,
        engine: TransferEngine | None,
        meter: Meter | None,
        inspect: Inspect | None,
        stopwatch: Stopwatch | None,
    ):
        self.graph, self.engine, self.meter, self.inspect, self.stopwatch = (
            graph,
            engine,
            meter,
            inspect,
            stopwatch,
        )
        self.globals: dict[str, Any] = {"Request": Request, "Wait": Wait}
        self.names = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
        self.constant_names: dict[int, str] = {}

    def source(self) -> str:
        dies = last_uses(self.graph)
        arguments = [self.names[n] for n in self.graph.nodes if n.op == "placeholder"]
        lines = [f"def run({', '.join(arguments)}):", "    if False: yield"]
        if self.stopwatch:
            lines.append(f"    {self._constant(self.stopwatch.mark)}()")
        for node in self.graph.nodes:
            if node.op == "output":
                lines.append(f"    return {self._value(node.args[0])}")
            elif node.op == "call_function":
                drop = "".join(f"; {self.names[d]} = None" for d in dies.get(node, ()))
                call = f"    {self.names[node]} = {self._call(node)}"
                lines += self._metered(node, call, self._inspected(node) + drop + _comment(node))
                if self.stopwatch and node in self.stopwatch.calls:
                    lines.append(f"    {self._constant(self.stopwatch.mark)}()")
            elif self.inspect:
                lines.append("    None" + self._inspected(node))
        if self.engine:
            lines.insert(-1, f"    {self._constant(self.engine.settle)}()")
        return "\n".join(lines)

    def _metered(self, node: fx.Node, call: str, drop: str) -> list[str]:
        """A call, with the calls of the meter around it."""
        if self.meter is None or node not in self.meter.needs:
            return [call + drop]
        count, what = self.meter.needs[node], str(node.meta.get("label") or node.name)
        need, hold = (self._constant(f) for f in (self.meter.budget.need, self.meter.budget.hold))
        return [f"    {need}({count}, {what!r})", call, f"    {hold}({self.names[node]}){drop}"]

    def _inspected(self, node: fx.Node) -> str:
        return f"; {self._constant(self.inspect)}({self._constant(node)}, {self.names[node]})" if self.inspect else ""

    def _call(self, node: Call) -> str:
        if node.target in COLLECTIVES:
            x, axis, *rest = node.args
            op = rest[0] if rest and isinstance(rest[0], str) else ""
            meeting = Meeting(COLLECTIVES[node.target], axis, node.meta.get("label", ""))
            how = f"{not is_begun(node)}, {self._constant(meeting)}"
            if node.target is exchange:
                how += f", {self._value(tuple(rest[:3]))}"
            return f"yield Request({COLLECTIVES[node.target]!r}, {axis!r}, {op!r}, {self._value(x)}, {how})"
        if node.target is wait:
            return f"yield Wait({self._value(node.args[0])})"
        if node.target in TRANSFERS:
            assert self.engine is not None, f"{node.target} needs a transfer engine"
            function = getattr(self.engine, TRANSFERS[node.target])
            return f"{self._constant(function)}({', '.join(map(self._value, node.args))})"
        values = [self._value(a) for a in node.args] + [self._keyword(k, v) for k, v in node.kwargs.items()]
        if self.engine and "host" in node.meta:
            return f"{self._constant(self.engine.compute)}({', '.join([self._constant(node.target), *values])})"
        return f"{self._constant(DIRECT.get(node.target, node.target))}({', '.join(values)})"

    def _keyword(self, name: str, value: Any) -> str:
        """`name=value`, or a form for names that are Python keywords, such as `from` of random_."""
        return f"**{{{name!r}: {self._value(value)}}}" if iskeyword(name) else f"{name}={self._value(value)}"

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, tuple):
            return f"({', '.join(map(self._value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if id(value) not in self.constant_names:
            name = re.sub(r"\W", "_", str(value)) if isinstance(value, torch._ops.OpOverload) else "c"
            self.constant_names[id(value)] = f"{name}_{len(self.constant_names)}"
            self.globals[self.constant_names[id(value)]] = value
        return self.constant_names[id(value)]


def _comment(node: fx.Node) -> str:
    """The label of a call, for tracebacks."""
    label = str(node.meta.get("label", "")).replace("\n", " ")
    return f"  # {label}" if label else ""
