"""Functions of tensors that a compiler makes out of graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.compile.loops import with_higher_order
from tutti.ir.step_graph import Spec
from tutti.launch.heartbeat import HEARTBEAT
from tutti.launch.progress import progress
from tutti.lower.inplace import written

How = tuple[tuple[tuple[int, ...], int], ...]


class Compiled:
    """The function of a functional ATen graph whose shapes and dtypes are known. It is compiled when it is first
    called, if it was not before (`compile_ahead`), and again where its arguments lie otherwise in memory; torch keeps
    the result in its cache on disk."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.made: dict[How, Callable] = {}

    def __call__(self, *args: torch.Tensor):
        function = self.made.get(_how(args))
        if function is None:
            with _busy():
                function = self.compile(args)
        return function(*args)

    def compile(self, args: Sequence[torch.Tensor]) -> Callable:
        """The function for arguments that lie in memory as these."""
        graph, modules = with_higher_order(self.graph)
        function = self.made[_how(args)] = compat.compile_graph(graph, args, modules)
        return function


def compile_ahead(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Compile the functions that a graph calls for what they are going to be given.

    Those that have nothing yet are compiled one after another, but for the work of C++ and Triton compilers, which run
    beside each other, as many as there are cores.
    """
    waiting = {node.target for node in graph.nodes if isinstance(node.target, Compiled) and not node.target.made}
    if not waiting:
        return
    try:
        with _busy(), progress("compiling") as tell:
            calls = [(function, args) for function, args in _calls(graph, inputs) if function in waiting]
            with compat.compilers_beside_each_other():
                for i, (function, args) in enumerate(calls, 1):
                    tell(f"compiling: function {i} of {len(calls)}")
                    function.compile(args)
                tell("compiling: waiting for the compilers of kernels")
    except BaseException:
        for function in waiting:
            function.made.clear()  # their kernels may never have been compiled
        raise


def _calls(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> list[tuple[Compiled, Sequence[torch.Tensor]]]:
    """Each function of a graph with arguments that lie in memory as its own will, but have none; once for each way.

    Values that lie alike are one tensor here, so that what layers have in common is found out once.
    """
    found: list[tuple[Compiled, Sequence[torch.Tensor]]] = []
    given, values, places = iter(inputs), {}, {}
    alike: dict[tuple, torch.Tensor] = {}  # holds them, so that an id stays what it is
    known: dict[tuple, tuple[Any, Any]] = {}  # what calls give, and where these tensors are

    def like(x: torch.Tensor) -> torch.Tensor:
        return alike.setdefault((x.shape, x.stride(), x.dtype, x.device), x)

    def outcome(node: Any, args: Any, kwargs: Any) -> Any:
        function = node.target
        if isinstance(function, Compiled):
            found.append((function, args))
            return fx.Interpreter(fx.GraphModule({}, function.graph)).run(*args)
        if function is operator.getitem and args[1] < len(args[0]):  # what is kept for a backward pass is not described
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
                x = next(given)
                values[node] = like(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device))
                places[node] = id(values[node])
            elif node.op == "call_function":
                key = node.target, repr(map_arg((node.args, node.kwargs), places.__getitem__)), node.meta.get("val")
                if key not in known:
                    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                    made = pytree.tree_map_only(torch.Tensor, like, outcome(node, args, kwargs))
                    known[key] = made, pytree.tree_map_only(torch.Tensor, id, made)
                values[node], places[node] = known[key]
    return found


def _empty(spec: Any, device: torch.device | None) -> Any:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device) if isinstance(spec, Spec) else spec


def _how(args: Sequence[torch.Tensor]) -> How:
    """How arguments lie in memory."""
    return tuple([(x.stride(), x.get_device()) for x in args])


@contextmanager
def _busy() -> Iterator[None]:
    HEARTBEAT.compiles(True)
    try:
        yield
    finally:
        HEARTBEAT.compiles(False)
