"""A Program replayed on fake tensors: what each call reads and makes, what shares memory, and what is dropped when.

Fake tensors have strides, so whether a reshape copies or looks at what is there is found out, not assumed. Calls are
replayed in the order of the Program and values dropped where its code drops them (`tutti.run.code`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti import compat
from tutti.graph.step_graph import Spec
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.inplace import IN_PLACE
from tutti.lower.program import Program
from tutti.run.code import last_uses
from tutti.run.memory_inside import lstm_workspace

aten, ops = torch.ops.aten, torch.ops.tutti

_COLLECTIVES: dict[Any, str] = dict(COLLECTIVES)


@dataclass(eq=False)
class Storage:
    """Memory that one call has made, or that an input of the Program lies in."""

    bytes: int
    node: fx.Node


@dataclass(frozen=True)
class Operand:
    """A tensor that a call reads."""

    spec: Spec
    storage: Storage
    contiguous: bool

    @property
    def bytes(self) -> int:
        """Bytes of memory that are read: an expanded tensor is larger than what it lies in."""
        return min(self.spec.bytes, self.storage.bytes)


@dataclass
class Event:
    """One call, or several that are one kernel.

    nodes: in order; the last gives its name. reads: tensor operands in order. made: the memory that is new with it.
    holds: what each of its values keeps alive. outputs: specs of what it returns. writes: bytes written in place.
    dies: values that are dropped behind it. reuses: bytes of what it makes that take the place of what it reads.
    """

    nodes: list[fx.Node]
    reads: list[Operand]
    made: list[Storage]
    holds: dict[fx.Node, list[Storage]]
    outputs: list[Spec]
    writes: int
    dies: list[fx.Node]
    reuses: int = 0

    @property
    def node(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def label(self) -> str:
        return self.node.meta.get("label", "")

    @property
    def phase(self) -> str:
        return self.node.meta.get("phase", "")

    @property
    def collective(self) -> str:
        """The kind of collective; empty for all other calls."""
        return _COLLECTIVES.get(self.node.target, "")

    @property
    def computes(self) -> bool:
        """False for views and renamings, which move no bytes."""
        return not self.collective and bool(self.made or self.writes)


@dataclass
class Replay:
    """inputs: the memory of each placeholder. outputs: the values that the Program returns."""

    program: Program
    inputs: dict[fx.Node, Storage]
    events: list[Event]
    outputs: list[fx.Node]


def replay(program: Program) -> Replay:
    """Replay a Program in the form in which it would run (the passes of its level applied, nothing compiled)."""
    return _Replayer(program).run()


class _Replayer:
    def __init__(self, program: Program):
        self.program = program
        self.values: dict[fx.Node, Any] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, Storage]] = {}
        self.fresh: list[Storage] = []

    def run(self) -> Replay:
        inputs, events, outputs = {}, [], []
        dies = last_uses(self.program.graph)
        with compat.fake_mode(), torch.no_grad():
            for node in self.program.graph.nodes:
                if node.op == "placeholder":
                    spec: Spec = node.meta["val"]
                    self.values[node] = torch.empty(spec.shape, dtype=spec.dtype)
                    inputs[node] = self.storage(self.values[node], node)
                elif node.op == "output":
                    outputs = [n for n in pytree.tree_leaves(node.args[0]) if isinstance(n, fx.Node)]
                else:
                    events.append(self.call(node, dies[node]))
        return Replay(self.program, inputs, events, outputs)

    def call(self, node: fx.Node, dies: list[fx.Node]) -> Event:
        reads = [
            Operand(Spec.of(x), self.storage(x, node), x.is_contiguous())
            for n in pytree.tree_leaves((node.args, node.kwargs))
            if isinstance(n, fx.Node)
            for x in _tensors(self.values[n])
        ]
        value = self.values[node] = self.result(node)
        self.fresh = []
        holds = list(dict.fromkeys(self.storage(x, node) for x in _tensors(value)))
        writes = sum(x.nbytes for x in _written(node, self.values))
        outputs = [Spec.of(x) for x in _tensors(value)]
        for dead in dies:
            self.values.pop(dead)
        return Event([node], reads, self.fresh, {node: holds}, outputs, writes, dies)

    def result(self, node: fx.Node) -> Any:
        if node.target in _WRITING:
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)  # pyright: ignore
        function: Callable[..., Any] = FAKES.get(node.target, node.target)  # pyright: ignore
        return function(*args, **kwargs)

    def storage(self, x: torch.Tensor, node: fx.Node) -> Storage:
        held = x.untyped_storage()
        if id(held) not in self.storages:  # kept from now on, so that no other gets its id
            self.storages[id(held)] = held, Storage(held.nbytes(), node)
            self.fresh.append(self.storages[id(held)][1])
        return self.storages[id(held)][1]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))


_WRITING: dict[Any, tuple[int, ...]] = {in_place: positions for in_place, _, positions in IN_PLACE.values()}


def _written(node: fx.Node, values: dict[fx.Node, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an in-place update of lists writes."""
    for position in _WRITING.get(node.target, ()):
        for n in pytree.tree_leaves(node.args[position]):
            yield values[n]


def _exchanged(shape: Callable[..., tuple[int, ...]]) -> Callable[..., torch.Tensor]:
    """What a runtime returns for a collective: dense, and in memory of its own."""
    return lambda x, *rest: x.new_empty(shape(x, *rest))


def _lstm_training(x, w_ih, w_hh, b_ih, b_hh, h, c, *options):
    made = ops.lstm_layer(x, w_ih, w_hh, b_ih, b_hh, h, c, *options)
    return *made, x.new_empty(lstm_workspace(x.shape, h.shape[-1]), dtype=torch.uint8)


def _lstm_backward_kept(*args):
    return ops.lstm_layer_backward(*args[:18])


def _reduced(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss whose kernel makes room for all elements and then calls the first of them the mean
    (`TORCH_META_FUNC(mse_loss)` in ATen/native/BinaryOps.cpp)."""

    def made(x, target, reduction=1, *rest):
        if reduction == 0:
            return function(x, target, reduction, *rest)
        return x.new_empty(torch.broadcast_shapes(x.shape, target.shape)).view(-1)[0]

    return made


# Calls that have no fake kernel, or another in the runtime.
FAKES: dict[Any, Callable[..., Any]] = {
    ops.all_reduce.default: _exchanged(lambda x, *_: x.shape),
    ops.all_gather.default: _exchanged(lambda x, axis, k: (k, *x.shape)),
    ops.reduce_scatter.default: _exchanged(lambda x, *_: x.shape[1:]),
    ops.all_to_all.default: _exchanged(lambda x, *_: x.shape),
    ops.shift.default: _exchanged(lambda x, *_: x.shape),
    ops.lstm_layer_training.default: _lstm_training,
    ops.lstm_layer_backward_kept.default: _lstm_backward_kept,
    aten.mse_loss.default: _reduced(aten.mse_loss.default),
    aten.smooth_l1_loss.default: _reduced(aten.smooth_l1_loss.default),
}
