"""Tracing: the ATen operators that a function of fake tensors calls, those of autograd among them, as a graph.

For what a capture needs it does what `make_fx` does, in less than half of the time: where nodes come from is told by
who traces (`sign`), not looked for in stacks, and what is known of a tensor is its `Spec`. Higher-order operators,
which hold functions, are refused.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tutti import compat
from tutti.graph.step_graph import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class Traced:
    """graph: every node has its `Spec`, or a tuple of them, in meta["val"], and what it was signed with. constants:
    tensors that are no arguments, by the targets of the nodes (`get_attr`) that stand for them."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]


class Refused(ValueError):
    """What is not traced."""


def trace(function: Callable, *args: torch.Tensor) -> Traced:
    """The graph of `function(*args)`, which returns tensors in tuples or lists; to be called in a mode of fake tensors,
    for fake arguments. What a trace within it calls is recorded by both.

    Raises `compat.ValuesNeeded` where it takes the values of a tensor to go on, Refused for a higher-order operator.
    """
    tracer = _Tracer(args)
    _active.append(tracer)
    try:
        with _no_casts_kept(), tracer:
            results = function(*args)
    except Refused:
        compat.forget_compiled()
        raise
    finally:
        _active.remove(tracer)
    tracer.graph.output(tracer.named(results))
    return Traced(tracer.graph, tracer.constants)


def sign(**meta: Any) -> None:
    """Nodes that the enclosing `trace` makes from now on carry this in their meta."""
    assert _active, "called outside of trace()"
    _active[-1].signature |= meta


def is_tracing() -> bool:
    """Whether what this thread runs is being traced, here or by `make_fx`."""
    here = threading.get_ident()
    return any(tracer.thread == here for tracer in _active) or compat.get_proxy_mode() is not None


class _Tracer(compat.TorchDispatchMode):
    supports_higher_order_operators = True  # says itself that it does not take them

    def __init__(self, args: tuple[torch.Tensor, ...]):
        super().__init__()
        self.thread = threading.get_ident()
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.signature: dict[str, Any] = {}
        # By id, until the tensor is gone: to hold it would make autograd believe that it is shared.
        self.nodes: dict[int, tuple[fx.Node, weakref.ref]] = {}
        for i, x in enumerate(args):
            self._is(x, self.graph.placeholder(f"arg{i}_1"))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise Refused(
                f"the model calls {func}, an operator of functions (as torch.cond or flex_attention are), which is not "
                "captured: write it with tensors alone, as torch.where(condition, a, b) or "
                "F.scaled_dot_product_attention; on one device tutti.jit(model) runs it as it is"
            )
        if not all(issubclass(kind, compat.FakeTensor) for kind in types):
            return NotImplemented  # it says itself what it is made of
        if func is torch.ops.prim.device.default:  # asked for twice an operator
            return args[0].fake_device
        simpler = compat.HONEST.get(func) or compat.decomposition(func, args)
        if simpler is not None:
            with self:
                return simpler(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags and not types:  # a number that the model keeps as a tensor
            with compat.unset_fake_temporarily():
                return func(*args, **kwargs)
        operands = self.named(args), self.named(kwargs)
        made = func(*args, **kwargs)
        if _holds_tensors(made) or func._schema.is_mutable:
            target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func  # may be written into
            node = self.graph.create_node("call_function", target, *operands, name=func.overloadpacket.__name__)
            self._is(made, node)
        return made

    def named(self, values: Any) -> Any:
        """Nodes in place of tensors."""
        if isinstance(values, torch.Tensor):
            known = self.nodes.get(id(values))
            return known[0] if known else self._constant(values)
        if isinstance(values, (list, tuple)):
            return type(values)([self.named(x) for x in values])
        if isinstance(values, dict):
            return {key: self.named(x) for key, x in values.items()}
        return values

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        self._is(tensor, node)
        return node

    def _is(self, made: Any, node: fx.Node) -> None:
        """Note that a node makes this, and what that is."""
        node.meta = {**self.signature, "val": Spec.of(made)}
        if isinstance(made, torch.Tensor):
            place, nodes = id(made), self.nodes
            nodes[place] = node, weakref.ref(made, lambda gone: nodes.pop(place, None))
        elif isinstance(made, (list, tuple)):
            for i, x in enumerate(made):
                if x is not None:
                    self._is(x, self.graph.call_function(operator.getitem, (node, i)))


_active: list[_Tracer] = []


def _holds_tensors(made: Any) -> bool:
    return isinstance(made, torch.Tensor) or (isinstance(made, (list, tuple)) and any(map(_holds_tensors, made)))


@contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Autocast, where it is on, keeps no casts: they would be fakes to who computes after the trace."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)
