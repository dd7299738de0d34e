"""Pure functions of a run's state, as programs: compiled over one `tutti.Store`, or plain Python.

A state is a nested dict of tensors. A function takes it and other arguments, and returns its successor and a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tutti
from tutti.compile.compiled import COMPILING
from tutti.exec.runtimes.runtime import alone
from tutti.hardware.threads import threads

LEVELS = ("eager", "O0", "O1", "O2")
Tree = dict[str, Any]


class Program:
    """Functions over one state.

    level: "eager" runs plain Python, which a debugger can follow; the others are levels of `tutti.function`.
    threads: PyTorch threads while a function runs. Networks of reinforcement learning are small: one is fastest.
    """

    def __init__(self, state: Tree, level: str, threads: int = 1):
        if level not in LEVELS:
            raise ValueError(f"level {level!r} is not one of {', '.join(LEVELS)}")
        self.level, self.threads = level, threads
        self.own: Tree = pytree.tree_map(torch.clone, state)  # no two tensors share memory
        self.store = None if level == "eager" else tutti.Store(run=self.own)
        self.compiled: dict[Any, Callable] = {}
        self.on_compile: Callable[[], None] | None = None  # called before a function is compiled

    def call(self, function: Callable[..., tuple[Tree, Any]], *args: Any) -> Any:
        """Replace the state by that which the function returns. Returns the function's result."""

        def run(*args: Any) -> Any:
            with torch.no_grad():
                new, result = function(self.own, *args)
            assign(self.own, new)
            return result

        return self._run(function, run, args, self.level)

    def ask(self, function: Callable[..., Any], *args: Any, level: str | None = None) -> Any:
        """The result of a function that leaves the state as it is. level: instead of the program's, for functions that
        are called too rarely to be compiled."""

        def run(*args: Any) -> Any:
            with torch.no_grad():
                return function(self.own, *args)

        return self._run(function, run, args, level or self.level)

    def _run(self, function: Callable, run: Callable, args: tuple, level: str) -> Any:
        with threads(self.threads), alone():
            return self._program(function, run, args, level)(*args)

    def _program(self, function: Callable, run: Callable, args: tuple, level: str) -> Callable:
        if self.store is None:
            return run
        kinds = tuple((x.shape, x.dtype) for x in pytree.tree_leaves(args) if isinstance(x, Tensor))
        key = function, kinds
        if key not in self.compiled:
            if self.on_compile is not None and level == "O2":
                self.on_compile()
            with COMPILING:
                compiled = tutti.function(run, *args, store=self.store, level=level, cluster="cpu:1")
                self.compiled[key] = compiled.fixed(*args)
        return self.compiled[key]

    def state(self) -> Tree:
        """The state now: dicts of its own, with the tensors that functions may write to later."""
        return pytree.tree_map(lambda x: x, self.own)

    def load(self, state: Tree) -> None:
        """Continue from another state with equal structure, shapes and dtypes. Functions stay compiled."""
        self.put(state)

    def put(self, part: Tree) -> None:
        """Replace some tensors of the state by others with equal shapes and dtypes."""
        for path, x in leaves(part).items():
            *parents, name = path.split(".")
            at = self.own
            for parent in parents:
                at = at[parent]
            if self.store is None:
                at[name] = x.clone()  # products of matrices depend on how memory is aligned
            else:
                at[name].copy_(x)


def assign(old: Tree, new: Tree, path: str = "") -> None:
    """Replace the leaves of a nested dict. Raises ValueError if its structure changes."""
    if old.keys() != new.keys():
        raise ValueError(f"the state{path} has {sorted(old)}, its successor {sorted(new)}")
    for key, x in new.items():
        if isinstance(x, dict):
            assign(old[key], x, f"{path}.{key}")
        else:
            old[key] = x


def leaves(state: Tree, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a nested dict by their paths, `learner.actor.m`."""
    tensors: dict[str, Tensor] = {}
    for key, x in state.items():
        if isinstance(x, dict):
            tensors |= leaves(x, f"{prefix}{key}.")
        else:
            tensors[prefix + key] = x
    return tensors


def with_leaves(state: Tree, flat: dict[str, Tensor]) -> Tree:
    """The nested dict with other tensors at these paths."""

    def at(tree: Tree, prefix: str) -> Tree:
        return {key: at(x, f"{prefix}{key}.") if isinstance(x, dict) else flat.get(prefix + key, x)
                for key, x in tree.items()}  # fmt: skip

    return at(state, "")
