"""`tutti.jit`: code that cannot be captured as one graph, static where possible and dynamic where not.

TorchDynamo follows the Python code of a call and compiles what it can follow as graphs. Where it cannot continue, such
as at an `if` on the value of a tensor, Python runs, and the next graph begins after it. Results, exceptions and side
effects equal those of plain Python, also where torch's defaults differ (`compat.AS_PYTHON`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any, overload

import torch
from torch import fx, nn

from tutti import compat
from tutti.analysis.passes import available
from tutti.api.jit_report import Graph, JitReport
from tutti.tracing.trace import breaks, recompilations
from tutti.tracing.trace.breaks import Break
from tutti.tracing.trace.recompilations import Recompilation
from tutti.tracing.trace.trace import is_tracing

# Backends: (graph, example inputs) -> callable.
LEVELS: dict[str, Callable[[fx.GraphModule, list], Callable]] = {
    "O0": lambda graph, inputs: graph.forward,
    "O2": compat.inductor,
}


@overload
def jit(target: Callable, *, level: str = "O2", dynamic: bool | None = None) -> Jit: ...
@overload
def jit(*, level: str = "O2", dynamic: bool | None = None) -> Callable[[Callable], Jit]: ...
def jit(target: Callable | None = None, *, level: str = "O2", dynamic: bool | None = None) -> Any:
    """Compile everything in `target` that can be a graph. Without a target, return a decorator.

    target: a function, a method, or a module. For a part of a model, its `forward`: `block.forward =
        tutti.jit(block.forward)`.
    level: "O2" compiles graphs, "O0" runs them operator by operator. Without a C++ compiler O2 becomes O0, with a
        warning.
    dynamic: whether graphs accept any sizes from the beginning. By default a size is left open once it has changed.

    Raises ValueError for another level, and TypeError if the target is not callable.

    >>> @tutti.jit(level="O0")
    ... def clipped(x):
    ...     y = 2 * x
    ...     if y.norm() > 1:
    ...         y = y / y.norm()
    ...     return y
    >>> clipped(torch.ones(4))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    >>> clipped.report().breaks[0].source
    'if y.norm() > 1:'
    """
    if target is None:
        return functools.partial(jit, level=level, dynamic=dynamic)
    return Jit(target, level, dynamic)


class Jit:
    """A compiled callable. Other attributes are those of the target (`fast.parameters()`)."""

    def __init__(self, target: Callable, level: str = "O2", dynamic: bool | None = None):
        if level not in LEVELS:
            raise ValueError(f"tutti.jit has no level {level!r}; choose from {', '.join(LEVELS)}")
        if not callable(target):
            raise TypeError(f"tutti.jit takes a function, a method or a module, not a {type(target).__name__}")
        if not isinstance(target, nn.Module):
            functools.update_wrapper(self, target)
        self.target, self.level, self.dynamic = target, available(level), dynamic
        self._graphs: list[Graph] = []
        self._breaks: dict[tuple[str, int, str], Break] = {}
        self._recompilations: list[Recompilation] = []
        if inspect.isgeneratorfunction(target):
            self._add(compat.GraphBreak("generator function", *_place_of(target), whole=True))
        self._fast = compat.split_by_dynamo(target, self._compile, dynamic)
        _quiet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or is_tracing():
            return self.target(*args, **kwargs)
        compat.tell_of_compilation(_compilation)
        outer = _at_work.call
        if outer is not None:
            outer.note()
        call = _at_work.call = _Call(self)
        try:
            return self._fast(*args, **kwargs)
        finally:
            call.end()
            _at_work.call = outer
            if outer is not None:
                outer.place = call.place

    def report(self) -> JitReport:
        """Graphs, breaks and recompilations of the calls so far."""
        target = self.target
        name = type(target).__name__ if isinstance(target, nn.Module) else getattr(target, "__qualname__", repr(target))
        return JitReport(
            name, self.level, tuple(self._graphs), tuple(self._breaks.values()), tuple(self._recompilations)
        )

    def _compile(self, graph: fx.GraphModule, inputs: list) -> Callable:
        compiled = Graph.of(graph)
        for node in graph.graph.find_nodes(op="call_function", target=torch.tensor):
            node.target = _copied
        graph.recompile()
        runs = LEVELS[self.level](graph, inputs)
        if compiled.operators:
            self._graphs.append(compiled)
        return runs

    def _add(self, graph_break: compat.GraphBreak) -> None:
        """Add a break once: a function that is compiled several times reports it each time."""
        new = breaks.put_into_words(graph_break)
        key = new.file, new.line, new.reason
        if key not in self._breaks or (new.whole and not self._breaks[key].whole):
            self._breaks[key] = new

    def _note(self, place: tuple[Any, int]) -> None:
        """Add what was compiled since a place in the log to the report."""
        broken, again = compat.compiled_since(place)
        for graph_break in broken:
            self._add(graph_break)
        self._recompilations += map(recompilations.put_into_words, again)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "target":  # not yet there, as in a copy
            raise AttributeError(name)
        return getattr(self.target, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Jit:
        """A Jit of a copy of the target."""
        return Jit(copy.deepcopy(self.target, memo), self.level, self.dynamic)

    def __repr__(self) -> str:
        return f"tutti.jit({self.target!r}, level={self.level!r})"


class _Call:
    """A running call of a Jit. Whatever is compiled meanwhile belongs to it."""

    def __init__(self, jit: Jit):
        self.jit, self.place, self.compiled = jit, compat.compilations(), False
        self.settings, self.silence = ExitStack(), ExitStack()

    def compiles(self) -> None:
        """Called before something is compiled."""
        if not self.compiled:
            self.settings.enter_context(compat.as_python())
        self.compiled = True
        self.note()
        self.silence.enter_context(compat.no_warnings_of_compilation())

    def end(self) -> None:
        self.settings.close()
        self.note()

    def note(self) -> None:
        place = compat.compilations()
        if place != self.place:
            self.jit._note(self.place)
            self.place = place


class _AtWork(threading.local):
    call: _Call | None = None


_at_work = _AtWork()


@functools.cache
def _quiet() -> None:
    """Silence TorchDynamo's warnings about calls of a Jit: the report has them."""
    compat.quiet_compiler(lambda: _at_work.call is not None)


def _compilation(begins: bool) -> None:
    if _at_work.call is not None:
        _at_work.call.compiles() if begins else _at_work.call.silence.close()


def _copied(data: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.tensor` without its warning: a NumPy number is a tensor in a graph."""
    return data.detach().clone().to(**kwargs) if isinstance(data, torch.Tensor) else torch.tensor(data, **kwargs)


def _place_of(function: Callable) -> tuple[str, int, str]:
    code = inspect.unwrap(function).__code__
    return code.co_filename, code.co_firstlineno, code.co_name
