"""Capture any Python function of tensors and of objects in a store, as one functional graph.

The function is ordinary PyTorch code. It may call modules, compute losses, call `backward()` and `optimizer.step()` of
several optimizers in any order, and write into caches. It runs on fake tensors in place of parameters, buffers, caches
and arguments. Their values at the end are the successors of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.ir.garbage import uncollected
from tutti.ir.kind import Kind, path_of, split_name
from tutti.ir.step_graph import FORWARD, UPDATE, StepGraph
from tutti.tracing import optimizers
from tutti.tracing.batch import FlatBatch
from tutti.tracing.build import build
from tutti.tracing.capture import Recorder, capturing, device_of
from tutti.tracing.explain import explained
from tutti.tracing.holdings import Holdings
from tutti.tracing.rewrite.functional import functionalize
from tutti.tracing.rewrite.pattern_table import PATTERNS
from tutti.tracing.rewrite.patterns import Pattern
from tutti.tracing.trace.attempts import Attempts, StateFound
from tutti.tracing.trace.decisions import Decisions
from tutti.tracing.trace.slots import Slots, check_dense, check_memory_not_shared
from tutti.tracing.trace.substitute import substituted
from tutti.tracing.trace.trace import sign, stand_in

BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@dataclass(frozen=True)
class Captured:
    """A captured function. tree: the structure of its result. fixed: leaves of the result that are not tensors, by
    position. updates: number of updates of each parameter, by name. attributes: paths of tensor attributes that are
    state."""

    graph: StepGraph
    tree: Any
    fixed: dict[int, Any]
    updates: dict[str, int]
    attributes: frozenset[str]

    @cached_property
    def changed(self) -> list[str]:
        """The names of stored tensors that a call changes."""
        return [name for name in self.graph.outputs if name in self.graph.inputs]


@uncollected()
def capture_function(
    function: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    holdings: Holdings,
    *,
    updates: Mapping[str, int] | None = None,
    patterns: Sequence[Pattern] = PATTERNS,
    attributes: frozenset[str] = frozenset(),
) -> Captured:
    """Capture `function(*args, **kwargs)` as one functional ATen graph.

    Inputs are the tensors of `holdings`, those in the arguments (`batch:` if dim 0 is the batch dim, else `common:`),
    `lr:optimizer.group`, `count:optimizer.class`, `step` and `seed`. Outputs are `output:i` for the i-th leaf of the
    result, and the successors of inputs.

    updates: how often each parameter has been updated; by default equally often. attributes: as in `capture`.

    Raises ValueError as `capture` does, for gradients that the function neither uses nor clears before it computes
    others, and for a learning rate that it changes.
    """
    data = FlatBatch(arguments(args, kwargs, holdings))
    slots, device = holdings.slots(attributes), device_of(holdings.root)
    with capturing(holdings.root):
        names = {p: name for name, p in slots.params.items()}
        tensors = {**slots.named(), **{Kind.CACHE.at(place.name): place.tensor for place in holdings.places}}
        for optimizer in holdings.optimizers.values():
            for name, state in optimizers.state_of(optimizer, names, holdings.fp32_master_weights).items():
                tensors |= {f"{kind}:{name}": x for kind, x in state.items()}
        check_dense(tensors | data.inputs)
        inputs = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in tensors.items()}
        for key, optimizer in holdings.optimizers.items():
            numbers = (f"lr:{key}.{i}" for i in range(len(optimizer.param_groups)))
            inputs |= {name: torch.empty((), dtype=torch.float64) for name in numbers}
        classes = update_classes(holdings, updates or {})
        inputs |= {name: torch.empty((), dtype=torch.int64) for name in classes}
        inputs |= {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in data.inputs.items()}
        inputs |= {name: torch.empty((), dtype=torch.int64) for name in ("step", "seed")}
        traced_function = _Function(function, args, kwargs, data, holdings, slots, list(inputs), classes)
        real = {name: x for name, x in data.inputs.items() if not (x.is_meta or isinstance(x, compat.FakeTensor))}
        arg_values = {i: real[name] for i, name in enumerate(inputs) if name in real}
        roots = [function, *holdings.objects.values(), holdings.root]  # the last gives paths
        attempts = Attempts(traced_function, tuple(inputs.values()), arg_values, roots, traced_function.decisions)
        try:
            with explained():
                traced = attempts.traced()
        except StateFound as error:
            return capture_function(function, args, kwargs, holdings, updates=updates, patterns=patterns,
                                    attributes=attributes | error.paths)  # fmt: skip
        placeholders = traced.graph.find_nodes(op="placeholder")
        of_data = {n: path_of(name) for n, name in zip(placeholders, inputs, strict=True)}
        guards = traced.values.guards(of_data)
        functional = functionalize(traced, list(inputs.values()))
    graph = build(functional, list(inputs), attempts.results, device, patterns)
    required = {"step", "seed", *graph.outputs}  # inputs that are written but not read are stored, too
    for name in [name for name, node in graph.inputs.items() if not node.users and name not in required]:
        graph.graph.erase_node(graph.inputs.pop(name))
    check_memory_not_shared(holdings.tensors(attributes), {name for name in graph.outputs if name in graph.inputs})
    graph.guards, graph.checks = guards, attempts.checks
    done = traced_function.updates
    graph.counts = {k: [p for p in members if p in done] for k, members in classes.items() if k in graph.inputs}
    return Captured(graph, traced_function.tree, traced_function.fixed, dict(traced_function.updates), attributes)


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any], holdings: Holdings) -> dict[str, Any]:
    """Return the arguments of a call that are data, not objects of the store, by position or name."""
    by_name = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    data = {name: x for name, x in by_name.items() if not holdings.contains(x)}
    for name, x in data.items():
        if isinstance(x, (nn.Module, torch.optim.Optimizer)):
            raise ValueError(f"argument {name!r} is a {type(x).__name__} that is not in the store; add it to the store")
    return data


def update_classes(holdings: Holdings, updates: Mapping[str, int]) -> dict[str, list[str]]:
    """Inputs that count updates -> parameters that their optimizer has updated equally often."""
    classes: dict[str, list[str]] = {}
    for key in holdings.optimizers:
        params = [name for name, owner in holdings.optimizer_of.items() if owner == key]
        numbers = sorted({updates.get(name, 0) for name in params}, reverse=True)
        for i, number in enumerate(numbers):
            classes[Kind.COUNT.at(f"{key}.{i}")] = [name for name in params if updates.get(name, 0) == number]
    return classes


@dataclass
class _Function:
    """A user's function as a function of named tensors, to be traced."""

    function: Callable
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    data: FlatBatch
    holdings: Holdings
    slots: Slots
    inputs: list[str]
    classes: dict[str, list[str]]
    decisions: Decisions = field(default_factory=Decisions)
    autograd: int = 0  # autograd nodes of all losses, in the last trace
    backward_matters: bool = True
    tree: Any = None
    fixed: dict[int, Any] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor, forward_only: bool = False) -> dict[str, torch.Tensor]:
        """The named outputs."""
        inputs = dict(zip(self.inputs, tensors, strict=True))
        self.autograd, self.updates = 0, {}
        params = {name: self._parameter(p, inputs[Kind.PARAM.at(name)]) for name, p in self.slots.params.items()}
        buffers = {name: inputs[Kind.BUFFER.at(name)].clone() for name in self.slots.buffers}
        names = [Kind.CACHE.at(place.name) for place in self.holdings.places]
        caches = {name: inputs[name].clone() for name in names}
        state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.holdings.optimizer_of}
        for name, x in inputs.items():
            kind, path = split_name(name)
            if path in state and kind != "param":
                state[path][kind] = x
        for name, buffer in self.slots.buffers.items():
            stand_in(buffer, buffers[name])
        for place in self.holdings.places:
            stand_in(place.tensor, caches[Kind.CACHE.at(place.name)])
        values = self.data.rebuilt(inputs)
        args = [values.get(str(i), x) for i, x in enumerate(self.args)]
        kwargs = {key: values.get(key, x) for key, x in self.kwargs.items()}
        recorder = Recorder(self.holdings.root)
        with ExitStack() as stack:
            stack.enter_context(self.slots.holding(params, buffers))
            stack.enter_context(self.holdings.holding(caches))
            updates = _Updates(self, params, state, inputs)
            stack.enter_context(updates.in_place())
            stack.enter_context(recorder.forward())
            stack.enter_context(substituted(self.holdings.root))
            stack.enter_context(_Backwards(self, recorder))
            result = self.function(*args, **kwargs)
            sign(phase=FORWARD, path="")
            outputs = self._outputs(result)
            outputs |= {Kind.BUFFER.at(name): x for name, x in self.slots.changed("buffer").items()}
            outputs |= self._caches(caches)
            outputs |= {Kind.PARAM.at(name): p.detach() for name, p in params.items()}
            outputs |= {f"{kind}:{name}": x for name, kinds in state.items() for kind, x in kinds.items()}
            outputs |= {Kind.CHECK.at(i): x for i, x in enumerate(self.decisions.differing())}
            updates.check_left_over()
        return outputs

    def _parameter(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Create the stand-in for a parameter: an autograd leaf with the parameter's hooks."""
        leaf = value.clone()
        if parameter.requires_grad:
            leaf.requires_grad_()
            before, after = compat.hooks_on(parameter)
            for hook in before:
                leaf.register_hook(hook)
            for hook in after:
                leaf.register_post_accumulate_grad_hook(hook)
        if isinstance(parameter, nn.Parameter):
            leaf._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
        stand_in(parameter, leaf)
        return leaf

    def _outputs(self, result: Any) -> dict[str, torch.Tensor]:
        leaves, self.tree = pytree.tree_flatten(result)
        self.fixed = {i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
        return {Kind.OUTPUT.at(i): x.detach() for i, x in enumerate(leaves) if i not in self.fixed}

    def _caches(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        caches = {}
        for place in self.holdings.places:
            name, now = Kind.CACHE.at(place.name), place.tensor
            old = inputs[name]
            if not isinstance(now, torch.Tensor) or (now.shape, now.dtype) != (old.shape, old.dtype):
                what = f"{tuple(now.shape)} {now.dtype}" if isinstance(now, torch.Tensor) else type(now).__name__
                raise ValueError(
                    f"the function changes {place.name!r} from {tuple(old.shape)} {old.dtype} to {what}; tensors in a "
                    "store keep their shape and dtype: write into a tensor of the final size"
                )
            caches[name] = now.detach()
        return caches


class _Updates:
    """Makes `optimizer.step()` update the stand-ins of parameters. state: by parameter and kind."""

    def __init__(self, function: _Function, params: dict[str, torch.Tensor],
                 state: dict[str, dict[str, torch.Tensor]], inputs: Mapping[str, torch.Tensor]):  # fmt: skip
        self.function, self.params, self.state, self.inputs = function, params, state, inputs
        self.cleared: set[int] = set()  # ids of leaves whose gradient was cleared before it was added to
        self.added: set[int] = set()  # ids of leaves that have had a gradient

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the stand-ins into the optimizers, within the block."""
        holdings = self.function.holdings
        by_id = {id(p): self.params[name] for name, p in self.function.slots.params.items()}
        before = {id(group): (group, list(group["params"]), group["lr"])
                  for optimizer in holdings.optimizers.values() for group in optimizer.param_groups}  # fmt: skip
        gradients = [(p, p.grad) for p in self.function.slots.params.values()]
        try:
            for group, members, _ in before.values():
                group["params"][:] = [by_id[id(p)] for p in members]
            for key, optimizer in holdings.optimizers.items():
                vars(optimizer)["step"] = lambda closure=None, key=key: self._step(key, closure)
                vars(optimizer)["zero_grad"] = lambda set_to_none=True, key=key: self._zero_grad(key)
            for module in holdings.modules.values():
                vars(module)["zero_grad"] = lambda set_to_none=True, module=module: self._clear(module.parameters())
            yield
            for key, optimizer in holdings.optimizers.items():
                for i, group in enumerate(optimizer.param_groups):
                    if group["lr"] is not before[id(group)][2] and group["lr"] != before[id(group)][2]:
                        raise ValueError(
                            f"the function changes the learning rate of group {i} of {key!r}; it is an input of every "
                            "call: step the scheduler outside the function"
                        )
        finally:
            for optimizer in holdings.optimizers.values():
                for name in ("step", "zero_grad"):
                    vars(optimizer).pop(name, None)
            for module in holdings.modules.values():
                vars(module).pop("zero_grad", None)
            for group, members, lr in before.values():
                group["params"][:] = members
                group["lr"] = lr
            for p, gradient in gradients:
                p.grad = gradient

    def _step(self, key: str, closure: Any) -> None:
        if closure is not None:
            raise ValueError("step(closure) cannot be captured: it may run the closure several times; call step()")
        function = self.function
        names = {id(leaf): name for name, leaf in self.params.items()}
        counts = {name: count for count, members in function.classes.items() for name in members}
        optimizer = function.holdings.optimizers[key]
        with torch.no_grad():
            for i, group in enumerate(optimizer.param_groups):
                for leaf in group["params"]:
                    if leaf.grad is None:
                        continue
                    name = names[id(leaf)]
                    sign(phase=UPDATE, path=name.rpartition(".")[0])
                    done = function.updates.get(name, 0)
                    count = self.inputs[counts[name]] + done if done else self.inputs[counts[name]]
                    numbers = count, self.inputs[f"lr:{key}.{i}"]
                    new, self.state[name] = optimizers.update(
                        optimizer, group, leaf.detach(), leaf.grad, self.state[name], *numbers
                    )
                    leaf.copy_(new)
                    function.updates[name] = done + 1
        sign(phase=FORWARD, path="")

    def _zero_grad(self, key: str) -> None:
        self._clear(p for group in self.function.holdings.optimizers[key].param_groups for p in group["params"])

    def _clear(self, leaves) -> None:
        for leaf in leaves:
            (self.cleared if leaf.grad is None and id(leaf) not in self.added else self.added).add(id(leaf))
            leaf.grad = None

    def check_left_over(self) -> None:
        """Raise ValueError if a gradient is left that PyTorch would add to the next call's."""
        for name, leaf in self.params.items():
            if leaf.grad is not None and id(leaf) not in self.cleared:
                raise ValueError(
                    f"the function leaves a gradient in parameter {name!r}, which the next call would add to: call "
                    "zero_grad() of its optimizer or module in the function"
                )
            leaf.grad = None


class _Backwards(TorchFunctionMode):
    """Marks what `backward()` and `torch.autograd.grad` compute as the backward pass."""

    def __init__(self, function: _Function, recorder: Recorder):
        super().__init__()
        self.function, self.recorder = function, recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in BACKWARDS:
            return func(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()))
        losses = [x for x in pytree.tree_leaves(first) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        nodes = [node for loss in losses for node in compat.in_backward_order(loss.grad_fn)]
        self.function.autograd += len(nodes)
        self.function.decisions.backward = True
        with self.recorder.backward(nodes):
            result = func(*args, **kwargs)
        self.function.decisions.backward = False
        sign(phase=FORWARD, path="")
        return result
