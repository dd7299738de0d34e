"""Compiled functions of FX graphs."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.compile.bias import take_biases_out
from tutti.compile.loops import with_higher_order
from tutti.compile.tanh import expand_tanh
from tutti.ir.spec import Spec
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.progress import progress
from tutti.lower.memory.inplace import written

COMPILING = threading.RLock()  # of threads that capture or compile: both replace what modules hold
How = tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Described:
    """What compilation needs to know of a tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> Described:
        return cls(x.shape, x.stride(), x.dtype, x.device)

    def stride(self) -> tuple[int, ...]:
        return self.strides


Arguments = Sequence[Any]  # tensors, or `Described`


class Compiled:
    """The compiled function of a functional ATen graph with static shapes and dtypes. It is compiled by
    `compile_ahead` or at the first call, and once more for arguments with other strides. torch caches the result on
    disk."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.compiled: dict[How, Callable] = {}

    def __call__(self, *args: torch.Tensor):
        function = self.compiled.get(_how(args))
        if function is None:
            with COMPILING, _busy():
                function = self.compile(args)
        return function(*args)

    def compile(self, args: Arguments) -> Callable:
        """The function for arguments with these strides."""
        graph, modules = self.rewritten(args)
        function = self.compiled[_how(args)] = compat.compile_graph(graph, args, modules)
        return function

    def rewritten(self, args: Arguments) -> tuple[fx.Graph, dict[str, fx.GraphModule]]:
        """The graph that Inductor compiles, and its sub-graphs by name."""
        graph, modules = with_higher_order(self.graph)
        if all(x.device.type == "cpu" for x in args):
            expand_tanh(graph)
            for body in (each for module in modules.values() for each in module.modules()):
                assert isinstance(body, fx.GraphModule)
                expand_tanh(body.graph)
                take_biases_out(body.graph)
                body.recompile()
        return graph, modules


def uncompiled(graph: fx.Graph, inputs: Arguments) -> list[tuple[Compiled, Arguments]]:
    """The functions that a graph calls and that are not compiled yet, with fake arguments."""
    waiting = {node.target for node in graph.nodes if isinstance(node.target, Compiled) and not node.target.compiled}
    return [(function, args) for function, args in _calls(graph, inputs) if function in waiting] if waiting else []


def compile_ahead(graph: fx.Graph, inputs: Arguments) -> None:
    """Compile the functions that a graph calls, for the strides of their arguments.

    Inductor runs for one function after another; the C++ and Triton compilers run in parallel, one per core.
    """
    calls = uncompiled(graph, inputs)
    if not calls:
        return
    try:
        with COMPILING, _busy(), progress("compiling functions") as tell, compat.compilers_beside_each_other():
            for i, (function, args) in enumerate(calls):
                tell.count(i, len(calls))
                function.compile(args)
            tell("compiling: waiting for the compilers of kernels")
    except BaseException:
        for function, _ in calls:
            function.compiled.clear()  # their kernels may not have been compiled
        raise


def _calls(graph: fx.Graph, inputs: Arguments) -> list[tuple[Compiled, Arguments]]:
    """Each function of a graph, with fake arguments of the strides it will get; once for each combination.

    Values with equal shapes and strides are one tensor here, so that equal layers are analysed once.
    """
    calls: list[tuple[Compiled, Arguments]] = []
    arguments, values, places = iter(inputs), {}, {}
    alike: dict[tuple, torch.Tensor] = {}  # keeps them alive, so that ids stay unique
    results: dict[tuple, tuple[Any, Any]] = {}  # results of calls, and where these tensors are

    def like(x: torch.Tensor) -> torch.Tensor:
        return alike.setdefault((x.shape, x.stride(), x.dtype, x.device), x)

    def outcome(node: Any, args: Any, kwargs: Any) -> Any:
        function = node.target
        if isinstance(function, Compiled):
            calls.append((function, args))
            return fx.Interpreter(fx.GraphModule({}, function.graph)).run(*args)
        if function is operator.getitem and args[1] < len(args[0]):  # opaque values have no description
            return args[0][args[1]]
        if getattr(function, "namespace", "") == "aten":
            return function(*args, **kwargs)
        if function is written:
            return args[1]
        device = next((x.device for x in args if isinstance(x, torch.Tensor)), None)
        return map_aggregate(node.meta.get("val"), lambda spec: _empty(spec, device))

    with compat.fake_mode():
        for node in graph.nodes:
            if node.op == "placeholder":
                x = next(arguments)
                values[node] = like(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device))
                places[node] = id(values[node])
            elif node.op == "call_function":
                key = node.target, repr(map_arg((node.args, node.kwargs), places.__getitem__)), node.meta.get("val")
                if key not in results:
                    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                    result = pytree.tree_map_only(torch.Tensor, like, outcome(node, args, kwargs))
                    results[key] = result, pytree.tree_map_only(torch.Tensor, id, result)
                values[node], places[node] = results[key]
    return calls


def _empty(spec: Any, device: torch.device | None) -> Any:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device) if isinstance(spec, Spec) else spec


def _how(args: Sequence[torch.Tensor]) -> How:
    """Strides and device of the arguments."""
    return tuple([(x.stride(), x.get_device()) for x in args])


@contextmanager
def _busy() -> Iterator[None]:
    HEARTBEAT.compiles(True)
    try:
        yield
    finally:
        HEARTBEAT.compiles(False)
