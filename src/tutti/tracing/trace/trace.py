"""Tracing: record the ATen operators called by a function of fake tensors, including those of autograd, as a graph.

Does what capture needs of `make_fx` in less than half the time: the caller provides the metadata of nodes (`sign`)
instead of stack traces, and the metadata of a tensor is its `Spec`. Higher-order operators are refused.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.ir.spec import Spec
from tutti.ir.values import Values, base_of, written_operands
from tutti.tracing.explain import note_call
from tutti.tracing.rewrite.input_free import InputFree
from tutti.tracing.rewrite.replace_operators import simpler
from tutti.tracing.trace.decisions import Decisions, site_of_caller
from tutti.tracing.trace.slots import same_view

aten = torch.ops.aten
OWN = ("aten", "prim", "prims", "tutti")  # namespaces of operators whose effects are known
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # namespaces


@dataclass(frozen=True)
class Traced:
    """graph: every node has its `Spec`, or a tuple of them, in meta["val"], and the metadata given to `sign`.
    constants: tensors that are not arguments, by the targets of their `get_attr` nodes. values: values read by Python.
    nodes: by ids of the tensors that are still alive. lifted: outside tensors that the function reads, whose
    placeholders follow those of the arguments."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    values: Values
    nodes: dict[int, tuple[fx.Node, weakref.ref]]
    lifted: list[torch.Tensor] = field(default_factory=list)


class Refused(ValueError):
    """The function cannot be traced."""


def trace(
    function: Callable,
    *args: torch.Tensor,
    arg_values: Mapping[int, torch.Tensor] | None = None,
    decisions: Decisions | None = None,
    after: Traced | None = None,
    lifts: bool = False,
) -> Traced:
    """Trace `function(*args)`, which returns tensors in tuples or lists, as a graph.

    Call it in a fake tensor mode, with fake arguments. Operators of a nested trace are recorded in both graphs.

    arg_values: real values of some arguments, by position, for Python code that reads values which depend on these
        only (`ir.values`).
    decisions: the side to take where Python evaluates an unknown boolean.
    after: an earlier trace. Its input-free tensors that are read now are computed again.
    lifts: whether other tensors that the function reads become inputs (`Traced.lifted`), as for a sub-graph.

    Raises `compat.ValuesNeeded` if Python reads other values, and Refused for a higher-order operator.
    """
    tracer = _Tracer(args, arg_values or {}, decisions, after, lifts)
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
    return Traced(tracer.graph, tracer.constants, tracer.values, tracer.nodes, tracer.lifted)


def sign(**meta: Any) -> None:
    """Add this to the meta of all nodes that the enclosing `trace` creates from now on."""
    assert _active, "called outside of trace()"
    _active[-1].signature |= meta


def stand_in(tensor: torch.Tensor, fake: torch.Tensor) -> None:
    """Make reads of a real tensor, or of its memory, read a traced fake in the enclosing `trace`."""
    assert _active, "called outside of trace()"
    _active[-1].stand_in(tensor, fake)


def stood_in() -> list[torch.Tensor]:
    """The real tensors given to `stand_in` that have been read."""
    assert _active, "called outside of trace()"
    return _active[-1].stood_in


def last_node() -> fx.Node:
    """The last node of the enclosing `trace`."""
    assert _active, "called outside of trace()"
    return next(iter(reversed(_active[-1].graph.nodes)))


def written_since(node: fx.Node) -> bool:
    """Return whether a value created up to that node has been written since."""
    later: set[fx.Node] = set()
    while (node := node.next).op != "root":
        if any(base_of(x) not in later for x in written_operands(node)):
            return True
        later.add(node)
    return False


def is_tracing() -> bool:
    """Return whether this thread is tracing, here or by `make_fx`."""
    here = threading.get_ident()
    return any(tracer.thread == here for tracer in _active) or compat.get_proxy_mode() is not None


class _Tracer(compat.TorchDispatchMode):
    supports_higher_order_operators = True  # to refuse them with an error of its own

    def __init__(self, args: tuple[torch.Tensor, ...], arg_values: Mapping[int, torch.Tensor],
                 decisions: Decisions | None, after: Traced | None, lifts: bool):  # fmt: skip
        super().__init__()
        self.lifts, self.lifted = lifts, []
        self.decisions, self.after = decisions, after
        self.input_free = InputFree(after.graph, after.constants) if after else None
        self.repeated: dict[fx.Node, fx.Node] = {}  # nodes of `after`, with their copies
        self.thread = threading.get_ident()
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.signature: dict[str, Any] = {}
        # By id, until the tensor is gone: to hold it would make autograd believe that it is shared.
        self.nodes: dict[int, tuple[fx.Node, weakref.ref]] = {}
        self.stand_ins: dict[int, torch.Tensor] = {}  # by the id of a real tensor
        self.storages: dict[int, torch.Tensor] = {}  # by the storage of a real tensor: that tensor
        self.stood_in: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []  # of stand-ins, kept alive with their nodes
        input_values = {}
        self.last_input: fx.Node | None = None
        for i, x in enumerate(args):
            self.last_input = node = self.graph.placeholder(f"arg{i}_1")
            self._is(x, node)
            if i in arg_values:
                input_values[node] = arg_values[i]
        self.values = Values(self.graph, input_values, self.constants)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise Refused(
                f"the model calls {func}, a higher-order operator (like torch.cond or flex_attention), which is not "
                "captured: use tutti.scan, tutti.while_loop or tutti.cond, or write it with plain operators, such as "
                "torch.where(condition, a, b) or F.scaled_dot_product_attention; on one device tutti.jit(model) runs "
                "it unchanged"
            )
        if func.namespace in COLLECTIVES and func is not torch.ops.c10d.barrier.default:
            raise Refused(
                f"{site_of_caller()}: the model calls {func}, a collective of torch.distributed. Leave it out: a step "
                "is written as for one device, on which sums and means are those of the global batch, and its plan "
                "places the communication"
            )
        if func._schema.is_mutable and func.namespace not in OWN:
            raise Refused(
                f"the model calls {func}, a custom operator that writes into an argument, which is not captured: write "
                "one that returns a new tensor (torch.library.custom_op with mutates_args=())"
            )
        if not all(issubclass(kind, compat.FakeTensor) for kind in types):
            return NotImplemented  # a tensor subclass, which calls operators on its own parts
        if func is torch.ops.prim.device.default:  # called twice for each operator
            return args[0].fake_device
        replacement = compat.HONEST.get(func) or simpler(func, args) or compat.decomposition(func, args)
        if replacement is not None:
            with self:
                return replacement(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags and not types:  # a number that the model keeps as a tensor
            with compat.unset_fake_temporarily():
                return func(*args, **kwargs)
        operands = self.named(args), self.named(kwargs)
        try:
            result = func(*args, **kwargs)
        except compat.ValuesNeeded:
            if (answer := self._answer(func, args, kwargs)) is None:
                raise
            return answer
        except RuntimeError as error:
            note_call(error, func, self.signature.get("path", ""), args)
            raise
        if _holds_tensors(result) or func._schema.is_mutable:
            target = recorded(func)
            node = self.graph.create_node("call_function", target, *operands, name=func.overloadpacket.__name__)
            self._is(result, node)
        return result

    def _answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of an operator that needs values: computed from the batch, or decided. None if unknown."""
        if func in (aten.index.Tensor, aten.masked_select.default):
            with self:
                x, masks = args if func is aten.index.Tensor else _broadcast(*args)
                indices = self._indices(masks)
                return None if indices is None else aten.index.Tensor(x, indices)
        line = str(site_of_caller() or "a line of Python")
        result = self.values.ask(func, self.named(args), self.named(kwargs), line)
        if result is not None:
            return _on(result, args[0].device)
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool and self.decisions:
            return self.decisions.decide(args[0])
        return None

    def _indices(self, masks: Any) -> list | None:
        """Convert boolean masks that depend only on the batch into indices. None if a mask depends on more."""
        indices: list = []
        for mask in masks:
            if mask is None or mask.dtype not in (torch.bool, torch.uint8):
                indices.append(mask)
                continue
            line = str(site_of_caller() or "a line of Python")
            coordinates = self.values.ask(aten.nonzero.default, (self.named(mask),), {}, line)
            if coordinates is None:
                return None
            with compat.computing_really():
                indices += [x.contiguous() for x in coordinates.to(mask.device).unbind(1)]
        return indices

    def named(self, values: Any) -> Any:
        """Replace tensors by their nodes."""
        if isinstance(values, torch.Tensor):
            entry = self.nodes.get(id(values))
            if self.lifts and entry and values.grad_fn is not None:
                node: Any = entry[0]  # also if autograd detached a saved tensor: once to save it, once to read it
                while node.meta.setdefault("differentiable", True) and node.target is aten.detach.default:
                    node = node.args[0]
            return entry[0] if entry else self._of_real(values)
        if isinstance(values, (list, tuple)):
            return type(values)([self.named(x) for x in values])
        if isinstance(values, dict):
            return {key: self.named(x) for key, x in values.items()}
        return values

    def stand_in(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        self.stand_ins[id(tensor)] = fake
        if tensor.layout is torch.strided and tensor.numel():
            self.storages.setdefault(tensor.untyped_storage()._cdata, tensor)

    def _of_real(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor that no traced operator created."""
        if id(tensor) in self.stand_ins:
            if all(x is not tensor for x in self.stood_in):
                self.stood_in.append(tensor)
            return self.named(self.stand_ins[id(tensor)])
        if isinstance(tensor, compat.FakeTensor) or tensor.layout is not torch.strided or not tensor.numel():
            return self._constant(tensor)
        owner = self.storages.get(tensor.untyped_storage()._cdata)
        if owner is None:
            return self._constant(tensor)
        if tensor.dtype != owner.dtype or not owner.is_contiguous():
            raise Refused(
                f"the model reads a view of a parameter or buffer, of shape {tuple(tensor.shape)}, made before, "
                "with another dtype or of a non-contiguous tensor; make the view in forward"
            )
        with self, torch.no_grad():
            offset = int(tensor.storage_offset() - owner.storage_offset())
            view = same_view(self.stand_ins[id(owner)].detach(), tensor.shape, tensor.stride(), offset)
        self.views.append(view)
        return self.named(view)

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        if self.lifts:
            with self.graph.inserting_after(self.last_input):
                self.last_input = node = self.graph.placeholder(f"lifted{len(self.lifted)}_1")
            self.lifted.append(tensor)
            self._is(tensor, node)
            return node
        if isinstance(tensor, compat.FakeTensor):
            if (node := self._of_earlier(tensor)) is not None:
                return node
            raise Refused(
                f"the model reads a tensor of shape {tuple(tensor.shape)} that an earlier capture left (in a global "
                "variable, or in a function's cache) and that has no values: create it in forward, or before"
            )
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        self._is(tensor, node)
        return node

    def _of_earlier(self, tensor: torch.Tensor) -> fx.Node | None:
        """Copy the nodes that computed a tensor in the earlier trace. Returns None if the tensor depends on inputs."""
        if self.after is None or self.input_free is None or id(tensor) not in self.after.nodes:
            return None
        original, _ = self.after.nodes[id(tensor)]
        for node in self.input_free.calls(original) or ():
            if node not in self.repeated:
                copy = self.graph.node_copy(node, self.repeated.__getitem__)
                if node.op == "get_attr":
                    copy.target = f"_tensor_constant{len(self.constants)}"
                    self.constants[copy.target] = self.after.constants[str(node.target)]
                self.repeated[node] = copy
        return self.repeated.get(original)

    def _is(self, result: Any, node: fx.Node) -> None:
        """Record the result of a node. Raises Refused for tensors that are not dense."""
        if isinstance(result, torch.Tensor) and (result.is_nested or result.layout is not torch.strided):
            kind = "nested" if result.is_nested else "sparse"
            remedy = (
                "padded tensors and a mask" if kind == "nested" else "dense ones, or index_add on indices and values"
            )
            raise Refused(f"the model makes a {kind} tensor with {node.target}, but tensors of a step are dense: use "
                          f"{remedy}")  # fmt: skip
        node.meta = {**self.signature, "val": Spec.of(result)}
        if self.lifts:
            node.meta["grad"] = torch.is_grad_enabled()
        if isinstance(result, torch.Tensor):
            place, nodes = id(result), self.nodes
            nodes[place] = node, weakref.ref(result, lambda gone: nodes.pop(place, None))
        elif isinstance(result, (list, tuple)):
            for i, x in enumerate(result):
                if x is not None:
                    self._is(x, self.graph.call_function(operator.getitem, (node, i)))


_active: list[_Tracer] = []


def recorded(func: Any) -> Any:
    """The operator that the graph gets for a call of `func`.

    An in-place change of shape writes no element: it is a view, under which the tensor is known from then on.
    """
    if func is aten.lift_fresh.default:
        return aten.lift_fresh_copy.default  # may be written into
    if torch.Tag.inplace_view not in func.tags:
        return func
    packet = func.overloadpacket.__name__
    if packet.startswith(("resize", "set")):  # they give the tensor other memory
        return func
    if func is aten.transpose_.default:
        return aten.transpose.int
    return getattr(getattr(aten, packet.removesuffix("_")), func._overloadname)


def _broadcast(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.expand(shape), [mask.expand(shape)]


def _on(values: Any, device: torch.device) -> Any:
    """Move real tensors to a device."""
    with compat.computing_really():
        return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), values)


def _holds_tensors(result: Any) -> bool:
    return isinstance(result, torch.Tensor) or (isinstance(result, (list, tuple)) and any(map(_holds_tensors, result)))


@contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Disable autocast's cache of casts: they would be fakes to code that runs after the trace."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)
