"""Replay a Program on fake tensors: what each call reads and allocates, what shares memory, and when values are freed.

Fake tensors have strides, so it is determined, not assumed, whether a reshape copies or is a view. Calls are replayed
in program order, and values are freed where the Program's code frees them (`tutti.exec.kernels.codegen`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti import compat
from tutti.analysis.liveness import last_uses
from tutti.ir.spec import Spec
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.memory.aliasing import WRITES
from tutti.lower.memory.reuse_operands import PLACE
from tutti.lower.memory.transfers import arrived, bring, fetch, lend, put, store
from tutti.lower.program import Program
from tutti.ops.recurrent import lstm_workspace
from tutti.plan.tier import DEVICE

aten, ops = torch.ops.aten, torch.ops.tutti

_COLLECTIVES: dict[Any, str] = dict(COLLECTIVES)


@dataclass(eq=False, slots=True)
class Storage:
    """Memory allocated by a call, or of an input of the Program."""

    bytes: int
    node: fx.Node

    @property
    def tier(self) -> str:
        return self.node.meta.get("tier", DEVICE)


class Form:
    """Shape, strides and dtype of a tensor. `form` returns one object for equal ones.

    in_rows: whether the last dim has stride 1.
    """

    __slots__ = ("contiguous", "in_rows", "itemsize", "shape", "spec", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.stride, self.itemsize = shape, stride, dtype.itemsize
        self.spec = Spec(shape, dtype)
        sizes = [(n, step) for n, step in zip(shape, stride, strict=True) if n != 1]
        runs = accumulate((n for n, _ in reversed(sizes)), mul, initial=1)
        self.contiguous = not self.spec.numel or all(
            step == run for (_, step), run in zip(reversed(sizes), runs, strict=False)
        )
        self.in_rows = not sizes or sizes[-1][1] in (0, 1)

    def fake(self) -> torch.Tensor:
        """A fake tensor of this form, at offset 0."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.spec.dtype)


form = cache(Form)  # one object for equal ones, which keys compare by identity


def dense_form(spec: Spec) -> Form:
    """The form of a contiguous tensor."""
    strides = accumulate((max(n, 1) for n in reversed(spec.shape[1:])), mul, initial=1)
    return form(spec.shape, tuple(strides)[::-1] if spec.shape else (), spec.dtype)


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor in replay: its form, its storage, and its offset in it, in elements."""

    form: Form
    storage: Storage
    offset: int = 0

    @property
    def spec(self) -> Spec:
        return self.form.spec

    @property
    def contiguous(self) -> bool:
        return self.form.contiguous

    @property
    def in_rows(self) -> bool:
        return self.form.in_rows

    @property
    def bytes(self) -> int:
        """Bytes of memory read. An expanded tensor is larger than its storage."""
        return min(self.form.spec.bytes, self.storage.bytes)


@dataclass(slots=True)
class Event:
    """One call, or several calls fused into a kernel.

    nodes: in order; the last gives the name. reads: tensor operands in order. allocated: new storages. holds: the
    storages that each value keeps alive. outputs: specs of the results. writes: bytes written in place. dies: values
    freed after it. reuses: bytes of results that overwrite inputs. collective: its kind, or "" for other calls.
    """

    nodes: list[fx.Node]
    reads: list[Operand]
    allocated: list[Storage]
    holds: dict[fx.Node, list[Storage]]
    outputs: list[Spec]
    writes: int
    dies: list[fx.Node]
    reuses: int = 0
    collective: str = ""

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
    def dtype(self) -> torch.dtype:
        """The dtype of the first output, or of the first operand if there is none."""
        return self.outputs[0].dtype if self.outputs else self.reads[0].spec.dtype

    @property
    def computes(self) -> bool:
        """False for views and renamings, which move no bytes."""
        return not self.collective and bool(self.allocated or self.writes)


@dataclass
class Replay:
    """inputs: the storage of each placeholder. outputs: the values that the Program returns."""

    program: Program
    inputs: dict[fx.Node, Storage]
    events: list[Event]
    outputs: list[fx.Node]


def replay(program: Program) -> Replay:
    """Replay a Program as it would run: after the passes of its level, without compilation."""
    return _Replayer(program).run()


class _Result(NamedTuple):
    """A tensor that a call returns.

    place: index of the operand that it is a view of; indices from the number of operands on are new storages.
    """

    form: Form
    offset: int
    place: int


TRIED: dict[tuple, tuple[Any, list[int]]] = {}  # by call: its results, and bytes of its new storages
MOST_TRIED = 100_000


class _Replayer:
    """Runs each distinct call once, so equal layers are replayed once."""

    def __init__(self, program: Program):
        self.program = program
        self.values: dict[fx.Node, Any] = {}

    def run(self) -> Replay:
        inputs, events, outputs = {}, [], []
        dies = last_uses(self.program.graph)
        with compat.fake_mode(), torch.no_grad():
            for node in self.program.graph.nodes:
                if node.op == "placeholder":
                    inputs[node] = self.input(node)
                elif node.op == "output":
                    outputs = [n for n in pytree.tree_leaves(node.args[0]) if isinstance(n, fx.Node)]
                else:
                    events.append(self.call(node, dies[node]))
        return Replay(self.program, inputs, events, outputs)

    def input(self, node: fx.Node) -> Storage:
        spec: Spec = node.meta["val"]
        self.values[node] = Operand(dense_form(spec), Storage(spec.bytes, node))
        return self.values[node].storage

    def call(self, node: fx.Node, dies: list[fx.Node]) -> Event:
        target, operands, allocated = node.target, [], []
        key = target, self.taken(node.args, operands), self.taken(node.kwargs, operands)
        reads, writes = (operands, 0) if target not in WRITING else self.read_and_written(node)
        if target is operator.getitem:
            value = self.values[node.args[0]][node.args[1]]  # pyright: ignore
        elif target in WRITES and target not in FAKES:  # returns nothing
            value = None
        elif target is aten.slice.Tensor and (part := _sliced(operands[0], *node.args[1:])):  # pyright: ignore
            value = part
        else:
            if (tried := TRIED.get(key)) is None:
                if len(TRIED) >= MOST_TRIED:
                    TRIED.clear()
                tried = TRIED[key] = self.attempt(node, operands)
            returned, new = tried
            allocated = [Storage(count, node) for count in new]
            value = _mapped(returned, lambda x: _placed(x, operands, allocated))
        self.values[node] = value
        results = list(_flat(value))
        for dead in dies:
            self.values.pop(dead)
        holds = list(dict.fromkeys(x.storage for x in results))
        return Event([node], reads, allocated, {node: holds}, [x.form.spec for x in results], writes, dies,
                     collective=_COLLECTIVES.get(target, ""))  # fmt: skip

    def taken(self, argument: Any, operands: list[Operand]) -> Any:
        """A hashable key of an argument. Its tensors are appended to `operands`, in order."""
        if isinstance(argument, fx.Node):
            value = self.values[argument]
            if isinstance(value, Operand):
                operands.append(value)
                return value.form
            operands += _flat(value)
            return _mapped(value, lambda x: x.form)
        if isinstance(argument, (tuple, list)):
            return tuple([self.taken(part, operands) for part in argument])
        if isinstance(argument, dict):
            return tuple([(name, self.taken(part, operands)) for name, part in argument.items()])
        return type(argument), argument  # 1, 1.0 and True are equal

    def read_and_written(self, node: fx.Node) -> tuple[list[Operand], int]:
        """The tensors that a call reads, and the bytes that it writes."""
        read, written = _read_and_written(node)
        reads, places = [], []
        self.taken(read, reads)
        self.taken(written, places)
        return reads, sum(x.spec.bytes for x in places)

    def attempt(self, node: fx.Node, operands: list[Operand]) -> tuple[Any, list[int]]:
        """Call the operator on fake tensors. Returns its results, and the bytes of each new storage."""
        fakes = [x.form.fake() for x in operands]
        left = iter(fakes)
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs),
            lambda n: _mapped(self.values[n], lambda _: next(left)),  # pyright: ignore
        )
        function: Callable[..., Any] = FAKES.get(node.target, node.target)  # pyright: ignore
        result = function(*args, **kwargs)  # pyright: ignore
        storages = [x.untyped_storage() for x in fakes]  # keep them alive while they are compared

        def place(x: torch.Tensor) -> _Result:
            storage = x.untyped_storage()
            index = next((i for i, other in enumerate(storages) if other is storage), len(storages))
            if index == len(storages):
                storages.append(storage)
            return _Result(form(tuple(x.shape), x.stride(), x.dtype), int(x.storage_offset()), index)

        returned = _mapped(result, place, torch.Tensor)
        return returned, [storage.nbytes() for storage in storages[len(fakes) :]]


def _placed(result: _Result, operands: list[Operand], new: list[Storage]) -> Operand:
    """Place a tensor that a call returned for fakes at offset 0: a view of an operand, or in a new storage."""
    if result.place >= len(operands):
        return Operand(result.form, new[result.place - len(operands)], result.offset)
    base = operands[result.place]
    begin = base.offset * base.form.itemsize // result.form.itemsize
    return Operand(result.form, base.storage, begin + result.offset)


def _sliced(
    x: Operand, dim: int = 0, begin: int | None = None, end: int | None = None, step: int = 1
) -> Operand | None:
    """A part of a tensor along a dim. Programs have many, with places of their own, so they are not tried.

    None if an argument is not a number.
    """
    shape, stride = x.form.shape, x.form.stride
    if not shape or not all(n is None or type(n) is int for n in (dim, begin, end, step)):
        return None
    first, last, _ = slice(begin, end, None).indices(shape[dim])
    dim %= len(shape)
    size = max(0, -(-(last - first) // step))
    part = form((*shape[:dim], size, *shape[dim + 1 :]), (*stride[:dim], stride[dim] * step, *stride[dim + 1 :]),
                x.spec.dtype)  # fmt: skip
    return Operand(part, x.storage, x.offset + first * stride[dim])


def _mapped(value: Any, function: Callable[[Any], Any], kind: type | tuple[type, ...] = (Operand, _Result)) -> Any:
    """Apply a function to the tensors of a value. Tuples and lists are mapped; anything else becomes None."""
    if isinstance(value, kind):
        return function(value)
    return tuple([_mapped(x, function, kind) for x in value]) if isinstance(value, (tuple, list)) else None


def _flat(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for x in value:
            yield from _flat(x)


WRITING = {aten.copy_.default, *PLACE, *WRITES}


def _read_and_written(node: fx.Node) -> tuple[Any, Any]:
    """The arguments that a call reads, and those that it writes."""
    if node.target is aten.copy_.default:
        return node.args[1:], node.args[:1]
    if node.target in PLACE:
        return node.args, node.kwargs[PLACE[node.target]]
    return (node.args, node.kwargs), tuple(node.args[i] for i in WRITES[node.target])


def _exchanged(shape: Callable[..., tuple[int, ...]]) -> Callable[..., torch.Tensor]:
    """The runtime's result of a collective: dense, in new memory."""
    return lambda x, *rest: x.new_empty(shape(x, *rest))


def _lstm_training(x, w_ih, w_hh, b_ih, b_hh, h, c, *options):
    outputs = ops.lstm_layer(x, w_ih, w_hh, b_ih, b_hh, h, c, *options)
    return *outputs, x.new_empty(lstm_workspace(x.shape, h.shape[-1]), dtype=torch.uint8)


def _lstm_backward_kept(*args):
    return ops.lstm_layer_backward(*args[:18])


def _reduced(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a loss whose kernel allocates all elements and then returns the first as the mean
    (`TORCH_META_FUNC(mse_loss)` in ATen/native/BinaryOps.cpp)."""

    def loss(x, target, reduction=1, *rest):
        if reduction == 0:
            return function(x, target, reduction, *rest)
        return x.new_empty(torch.broadcast_shapes(x.shape, target.shape)).view(-1)[0]

    return loss


# Calls without a fake kernel, or with a different one in the runtime.
FAKES: dict[Any, Callable[..., Any]] = {
    ops.all_reduce.default: _exchanged(lambda x, *_: x.shape),
    ops.all_gather.default: _exchanged(lambda x, axis, k: (k, *x.shape)),
    ops.reduce_scatter.default: _exchanged(lambda x, *_: x.shape[1:]),
    ops.all_to_all.default: _exchanged(lambda x, *_: x.shape),
    ops.ppermute.default: _exchanged(lambda x, *_: x.shape),
    ops.exchange.default: _exchanged(lambda x, axes, sends, receives, rows, _: (rows, *x.shape[1:])),
    **dict.fromkeys((fetch, put, lend, bring), lambda x, *_: torch.empty_like(x)),
    arrived: lambda x: x,
    store: lambda home, x: home,
    ops.lstm_layer_training.default: _lstm_training,
    ops.lstm_layer_backward_kept.default: _lstm_backward_kept,
    aten.mse_loss.default: _reduced(aten.mse_loss.default),
    aten.smooth_l1_loss.default: _reduced(aten.smooth_l1_loss.default),
}
