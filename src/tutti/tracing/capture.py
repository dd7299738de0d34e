"""Capture: a model, a batch and an optimizer become one StepGraph.

The step runs once on fake tensors (no memory, no arithmetic) and is traced: forward, `autograd.grad`, optimizer update.
Python control flow that does not depend on tensor values is simply executed.
"""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from tutti import compat
from tutti.ir.garbage import uncollected
from tutti.ir.kind import Kind, kind_of, path_of
from tutti.ir.step_graph import BACKWARD, FORWARD, GUARD, UPDATE, StepGraph
from tutti.keywords import names_nearest
from tutti.nn.assignment import assignments_of_tensors
from tutti.tracing import optimizers
from tutti.tracing.batch import Batch, FlatBatch
from tutti.tracing.build import build
from tutti.tracing.criteria import PREFIX, WithCriteria, model_of
from tutti.tracing.explain import explained
from tutti.tracing.rewrite.functional import functionalize
from tutti.tracing.rewrite.pattern_table import PATTERNS
from tutti.tracing.rewrite.patterns import Pattern
from tutti.tracing.rewrite.routing import annotate_routing
from tutti.tracing.trace.attempts import Attempts, StateFound
from tutti.tracing.trace.decisions import Decisions
from tutti.tracing.trace.slots import Slots, check_attributes, check_dense, check_memory_not_shared
from tutti.tracing.trace.substitute import substituted
from tutti.tracing.trace.trace import sign, stand_in, stood_in

Loss = Callable[[nn.Module, Batch], torch.Tensor]


@uncollected()
@names_nearest
def capture(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    *,
    clip_norm: float | None = None,
    fp32_master_weights: bool = False,
    stochastic_rounding: bool = False,
    gradients: bool = True,
    guarded: bool = False,
    patterns: Sequence[Pattern] = PATTERNS,
    attributes: frozenset[str] = frozenset(),
    microbatches: int = 1,
    behind: Mapping[str, int] | None = None,
    metrics: Collection[str] = (),
    only: Collection[str] | None = None,
) -> StepGraph:
    """Capture loss, gradients and optimizer update of one training step as one functional ATen graph.

    model: any module; on the meta device it takes no memory. Its training mode is respected.
    batch: a dict (passed as keyword arguments) or a tuple of tensors, nested at will (`tracing.batch`). Values matter
        only if the model's Python code reads them, and for entries that are not tensors.
    optimizer: a `torch.optim` instance over the model's parameters; without one the graph ends at the gradients.
    loss: `loss(model, batch) -> 0-d tensor`; by default the model is called, and its output is the loss or has `.loss`.
    clip_norm: clip the global norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
    fp32_master_weights: keep and update float32 copies of low-precision parameters with the optimizer state.
    stochastic_rounding: update bfloat16 parameters and their optimizer state in float32, and round stochastically
        (unbiased).
    gradients: False captures the forward pass only.
    guarded: leave parameters and optimizer state unchanged if loss or gradients are not finite; the output `skipped`, a
        0-d float32 tensor, is then 1.
    patterns: the decomposed operators to replace by fused ones (`tracing.rewrite.patterns`); () replaces none.
    attributes: paths of plain tensor attributes that are state like buffers. Capture finds those that forward replaces.
    microbatches: number of batches accumulated for an update. The captured gradient is that of one; hooks on gradients
        see it divided by this number, as in a loop that accumulates the mean.
    behind: by how many updates parameters lag the step number, by name; by default as in the optimizer's state.
    metrics: entries of the model's output that become outputs `metric:name`. A loss that returns (loss, metrics) gives
        all of them.
    only: names of the parameters to compute gradients for and to update, of those that require gradients; by default
        all of them. The backward pass ends where no earlier parameter is trained.

    An enclosing `torch.autocast` is captured too. The forward pass runs on fake tensors, and changes to the model's
    Python state are undone. Values that Python code reads from the batch become constants (`StepGraph.guards`).
    Branches on other values are traced both ways: a side that raises becomes a check (`StepGraph.checks`). Checks
    inside operators, such as the one for singular matrices in `torch.linalg.solve`, are dropped: the result is infinite
    or NaN.

    Raises ValueError if the loss is not a 0-d floating-point tensor, if nothing requires a gradient, if the model
    branches on values that depend on parameters, or if forward depends on Python state that it changes.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(f"the optimizer is a {kind}, not a torch.optim.Optimizer; pass (model, batch, optimizer)")
    if isinstance(loss, nn.modules.loss._Loss):
        raise ValueError(f"loss is {type(loss).__name__}, but it is called as loss(model, batch): give a function, "
                         "such as lambda model, batch: criterion(model(batch[0]), batch[1])")  # fmt: skip
    if optimizer is not None:
        optimizers.check(optimizer)
    if clip_norm is not None and optimizer is None:
        raise ValueError(f"clip_norm={clip_norm} needs an optimizer: it clips gradients before the update")
    if fp32_master_weights and stochastic_rounding:
        raise ValueError("fp32_master_weights and stochastic_rounding exclude each other: masters are never rounded")
    slots, device = Slots(model, attributes), device_of(model)
    params = slots.params
    trained = [name for name, p in params.items() if p.requires_grad and (only is None or name in only)]
    if isinstance(model, WithCriteria) and optimizer is not None:
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [name for name in trained if id(params[name]) in updated or not name.startswith(f"{PREFIX}.")]
    trained = trained if gradients else []
    if gradients and not trained:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    if stochastic_rounding and not any(params[name].dtype is torch.bfloat16 for name in trained):
        raise ValueError("stochastic_rounding needs a trained bfloat16 parameter; there is none")

    flat = FlatBatch(batch)
    check_dense(slots.named() | flat.inputs)
    with capturing(model):

        def fakes(kind: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            return {f"{kind}:{k}": torch.empty(t.shape, dtype=t.dtype, device=device) for k, t in tensors}

        inputs = fakes("param", params.items()) | fakes("buffer", slots.buffers.items())
        state = {}
        if optimizer is not None:
            names = {p: name for name, p in params.items()}
            state = optimizers.state_of(optimizer, names, fp32_master_weights)
            for name, tensors in state.items():
                inputs |= {
                    f"{kind}:{name}": torch.empty(t.shape, dtype=t.dtype, device=device) for kind, t in tensors.items()
                }
            inputs |= {Kind.LR.at(i): torch.empty((), dtype=torch.float64) for i in range(len(optimizer.param_groups))}
        inputs |= {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in flat.inputs.items()}
        late = classes_of(behind if behind is not None else _behind(optimizer, params))
        inputs |= {name: torch.empty((), dtype=torch.int64) for name in ("step", "seed", *late)}
        step = _Step(model, flat, loss, slots, trained, gradients, guarded, optimizer, state, clip_norm,
                     stochastic_rounding, list(inputs), microbatches, late, metrics)  # fmt: skip
        arg_values = {i: x for i, x in enumerate(_example(flat, list(inputs))) if x is not None}
        attempts = Attempts(step, tuple(inputs.values()), arg_values, [model_of(model), loss], step.decisions)
        try:
            with explained():
                traced = attempts.traced()
        except StateFound as error:
            again = attributes | error.paths
            check_attributes(model, error.paths)
            return capture(
                model,
                batch,
                optimizer,
                loss,
                clip_norm=clip_norm,
                fp32_master_weights=fp32_master_weights,
                gradients=gradients,
                stochastic_rounding=stochastic_rounding,
                guarded=guarded,
                patterns=patterns,
                attributes=again,
                microbatches=microbatches,
                behind=behind,
                metrics=metrics,
                only=only,
            )
        placeholders = traced.graph.find_nodes(op="placeholder")
        names = {n: path_of(name) for n, name in zip(placeholders, inputs, strict=True)}
        guards = traced.values.guards(names)
        functional = functionalize(traced, list(inputs.values()))
    graph = build(functional, list(inputs), attempts.results, device, patterns)
    written = [path_of(name) for name in graph.changed_by_forward if kind_of(name) == Kind.PARAM]
    if mastered := [name for name in written if "master" in state.get(name, {})]:
        raise ValueError(
            f"forward writes into parameter {mastered[0]!r}, but its float32 master copy would undo that; leave out "
            "fp32_master_weights, or keep the parameter in float32"
        )
    check_memory_not_shared(slots.named(), {name for name in graph.outputs if name in graph.inputs})
    annotate_routing(graph, model)
    graph.guards, graph.checks = guards, attempts.checks
    updated = set(graph.updated)
    graph.counts = {key: [n for n in names if n in updated] for key, names in late.items() if key in graph.inputs}
    return graph


def classes_of(behind: Mapping[str, int]) -> dict[str, list[str]]:
    """Inputs that count updates, with the parameters that lag the step number equally."""
    classes: dict[int, list[str]] = {}
    for name, number in sorted(behind.items()):
        if number:
            classes.setdefault(number, []).append(name)
    return {Kind.COUNT.at(i): names for i, names in enumerate(sorted(classes.values()))}


def _behind(optimizer: torch.optim.Optimizer | None, params: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return by how many updates each parameter lags the one with the most."""
    if optimizer is None:
        return {}
    counts = optimizers.update_counts(optimizer)
    largest = max(counts.values(), default=0)
    return {name: largest - counts[p] for name, p in params.items() if p in counts}  # pyright: ignore


def _example(batch: FlatBatch, inputs: Sequence[str]) -> list[torch.Tensor | None]:
    """Return the real tensor of each input that is a batch entry with values, else None."""
    real = {name: x for name, x in batch.inputs.items() if not (x.is_meta or isinstance(x, compat.FakeTensor))}
    return [real.get(name) for name in inputs]


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU for a model on the meta device."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


@dataclass
class _Step:
    """A training step as a function of its tensors, to be traced."""

    model: nn.Module
    batch: FlatBatch
    loss: Loss | None
    slots: Slots
    trained: list[str]
    gradients: bool
    guarded: bool
    optimizer: torch.optim.Optimizer | None
    state: dict[str, dict[str, torch.Tensor]]
    clip_norm: float | None
    stochastic_rounding: bool
    inputs: list[str]
    microbatches: int
    late: dict[str, list[str]]
    metrics: Collection[str]
    decisions: Decisions = field(default_factory=Decisions)
    autograd: int = 0  # autograd nodes of the loss, in the last trace
    backward_matters: bool = False  # whether there are hooks or custom backward passes

    def __call__(self, *tensors: torch.Tensor, forward_only: bool = False) -> dict[str, torch.Tensor]:
        """The named outputs; with `forward_only` those of the forward pass."""
        inputs = dict(zip(self.inputs, tensors, strict=True))
        params = {name: self._parameter(name, p, inputs) for name, p in self.slots.params.items()}
        buffers = {name: inputs[Kind.BUFFER.at(name)].clone() for name in self.slots.buffers}
        for name, buffer in self.slots.buffers.items():
            stand_in(buffer, buffers[name])
        self._let_state_stand_in(inputs)
        storages = {name: p.untyped_storage()._cdata for name, p in params.items()}
        batch = self.batch.rebuilt(inputs)
        recorder = Recorder(self.model)
        with self.slots.holding(params, buffers):  # until gradients are computed: checkpointed code runs again then
            with recorder.forward(), substituted(self.model) as hooked:
                value, metrics = self._value(batch)
            _check_scalar(value, self.batch, self.loss)
            after = self.slots.changed("buffer")
            self._check_places(params, storages)
            outputs = {"loss": value.detach()}
            outputs |= {Kind.BUFFER.at(name): x for name, x in after.items()}
            outputs |= {Kind.METRIC.at(name): x.detach() for name, x in metrics.items()}
            outputs |= {Kind.CHECK.at(i): x for i, x in enumerate(self.decisions.differing())}
            behind = compat.in_backward_order(value.grad_fn) if value.requires_grad else []
            self.autograd = len(behind)
            self.backward_matters = hooked() or any(map(compat.is_custom, behind))
            self.decisions.backward = True
            if not self.gradients or forward_only:
                return outputs
            if not value.requires_grad:
                raise ValueError(
                    "the loss does not depend on any parameter that requires a gradient: is it computed under "
                    "torch.no_grad() or from a detached tensor?"
                )
            with recorder.backward(behind):
                grads = self._gradients(value, {name: params[name] for name in self.trained})
        if self.guarded:
            sign(phase=BACKWARD, path=GUARD)
            grads = optimizers.poisoned(grads, value.detach())
        outputs |= {Kind.WRITTEN.at(name): p for name, p in params.items()}  # most are unchanged
        outputs |= {Kind.GRAD.at(name): g for name, g in grads.items()}
        if self.optimizer is not None:
            with torch.no_grad():
                outputs |= self._update(params, grads, inputs)
        return outputs

    def _parameter(self, name: str, parameter: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The stand-in for a parameter: an autograd leaf that looks like it."""
        leaf = inputs[Kind.PARAM.at(name)].clone()
        if name in self.trained:
            leaf.requires_grad_()
        if isinstance(parameter, nn.Parameter):
            leaf._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
        stand_in(parameter, leaf)
        return leaf

    def _let_state_stand_in(self, inputs: dict[str, torch.Tensor]) -> None:
        """Register stand-ins for optimizer state, in case the loss reads it."""
        for name, kinds in self.state.items():
            state = self.optimizer.state.get(self.slots.params[name], {}) if self.optimizer else {}
            for kind in kinds:
                if isinstance(state.get(kind), torch.Tensor):
                    stand_in(state[kind], inputs[f"{kind}:{name}"])

    def _value(self, batch: Batch) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the loss, and the metrics that were requested or that the loss function returns."""
        if self.loss is not None:
            result: Any = self.loss(model_of(self.model), batch)
            if isinstance(result, dict) and "loss" in result:
                result = result["loss"], {key: x for key, x in result.items() if key != "loss"}
            if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
                return result[0], self._metrics(result[1], self.metrics or list(map(str, result[1])))
            return result, self._metrics(result, self.metrics)
        output = _called(self.model, batch)
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        return value, self._metrics(output, self.metrics)

    def _metrics(self, output: Any, names: Collection[str]) -> dict[str, torch.Tensor]:
        metrics = {}
        for name in names:
            value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
            if not isinstance(value, torch.Tensor):
                has = list(output) if isinstance(output, Mapping) else []
                raise ValueError(
                    f"metric {name!r} is a {type(value).__name__} in the output of the model; it has {has}"
                )
            metrics[name] = value
        return metrics

    def _check_places(self, params: dict[str, torch.Tensor], storages: dict[str, int]) -> None:
        """Raise ValueError if forward replaced a parameter's tensor."""
        for slot in [slot for slot in self.slots.slots if slot.kind == "param"]:
            now, name = slot.content, slot.name
            if now is not params[name] or now.untyped_storage()._cdata != storages[name]:
                raise ValueError(
                    f"forward replaces the tensor of parameter {name!r} (by assignment to the attribute or to .data), "
                    "which the optimizer would not see; write into it with copy_() under torch.no_grad()"
                )

    def _gradients(self, value: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return gradients by name, after their hooks. Gradients that are None are omitted."""
        hooks = {name: compat.hooks_on(self.slots.params[name]) for name in leaves}  # before and after accumulation
        for name, (before, _) in hooks.items():
            for hook in before:
                leaves[name].register_hook(hook)
        stand_ins = [p for p in stood_in() if p.requires_grad and p.is_leaf and p.is_floating_point()]
        names = {id(p): name for name, p in self.slots.params.items()}
        stand_ins = [p for p in stand_ins if names.get(id(p)) in leaves]
        parts = self.microbatches if self.backward_matters or any(map(any, hooks.values())) else 1
        computed = torch.autograd.grad(
            value / parts if parts > 1 else value, [*leaves.values(), *stand_ins], allow_unused=True
        )
        if parts > 1:  # for hooks that are not linear
            computed = [None if g is None else g * parts for g in computed]
        grads = {name: g for name, g in zip(leaves, computed, strict=False) if g is not None}
        for p, g in zip(stand_ins, computed[len(leaves) :], strict=True):  # read from a list of weights
            name = names[id(p)]
            if any(hooks[name]):
                raise ValueError(
                    f"parameter {name!r} has a gradient hook, but is not read as an attribute of its module; read it "
                    "as one"
                )
            if g is not None:
                grads[name] = grads[name] + g if name in grads else g
        for name in [name for name in grads if hooks[name][1]]:
            grads[name] = self._accumulated(name, leaves[name], grads[name], hooks[name][1])
        return grads

    def _accumulated(self, name: str, leaf: torch.Tensor, grad: torch.Tensor, hooks: list[Callable]) -> torch.Tensor:
        """The gradient after `register_post_accumulate_grad_hook` hooks."""
        version = leaf._version
        leaf.grad = grad
        try:
            if self.microbatches > 1:
                raise ValueError("it reads a sum over several microbatches, which is not captured; use register_hook")
            for hook in hooks:
                hook(leaf)
            if leaf.grad is None or leaf._version != version:
                raise ValueError("it updates the parameter or drops the gradient; leave that to the optimizer")
            return leaf.grad
        except Exception as error:
            hook = getattr(hooks[0], "__qualname__", hooks[0])
            raise ValueError(
                f"the hook {hook} on parameter {name!r} (register_post_accumulate_grad_hook) cannot be captured in the "
                f"step: {error}"
            ) from error
        finally:
            leaf.grad = None

    def _update(self, params, grads, inputs) -> dict[str, torch.Tensor]:
        """The optimizer's update of every parameter with a gradient, as named outputs."""
        assert self.optimizer is not None
        sign(phase=UPDATE, path=GUARD if self.clip_norm is None else "")
        norm = None if self.clip_norm is None and not self.guarded else optimizers.global_norm(list(grads.values()))
        sign(path="")
        scale = None if norm is None or self.clip_norm is None else optimizers.clip_scale(norm, self.clip_norm)
        names = {p: name for name, p in self.slots.params.items()}
        sign(path=GUARD)
        skip = None if norm is None or not self.guarded else optimizers.not_finite(norm)
        sign(path="")
        outputs = {} if skip is None else {"skipped": skip}
        if norm is not None and self.clip_norm is not None:
            outputs["grad_norm"] = norm
        for i, group in enumerate(self.optimizer.param_groups):
            for name in [names[param] for param in group["params"]]:
                if name not in grads:
                    continue
                sign(path=name.rpartition(".")[0])
                old = {kind: inputs[f"{kind}:{name}"] for kind in self.state.get(name, {})}
                count = next((key for key, names in self.late.items() if name in names), "step")
                numbers = inputs[count], inputs[Kind.LR.at(i)], skip, scale, self.stochastic_rounding
                new, new_state = optimizers.update(self.optimizer, group, params[name], grads[name], old, *numbers)
                outputs[Kind.PARAM.at(name)] = new
                outputs |= {f"{kind}:{name}": value for kind, value in new_state.items()}
        return outputs


@contextmanager
def capturing(model: nn.Module) -> Iterator[None]:
    """The fake tensor mode and patches under which a model's Python code is captured."""
    with (
        compat.fake_mode(),
        _fused_experts(model),
        _fused_sinks(model),
        compat.eager_models(),
        compat.hessians_in_reverse(),
        compat.no_nested_tensors(),
        assignments_of_tensors(),
    ):
        yield


def _fused_experts(model: nn.Module) -> AbstractContextManager:
    """Use tutti.models.experts for transformers models with the default implementation of experts."""
    if "transformers.integrations.moe" not in sys.modules:
        return nullcontext()
    from tutti.models.experts import taken_by_default

    return taken_by_default(model)


def _fused_sinks(model: nn.Module) -> AbstractContextManager:
    """Use tutti.models.sinks for transformers models whose attention has sinks."""
    if "transformers.models.gpt_oss" not in sys.modules:
        return nullcontext()
    from tutti.models.sinks import fused_by_default

    return fused_by_default(model)


def _called(model: nn.Module, batch: Batch) -> Any:
    """Call the model. Raises TypeError with advice if its forward does not take the entries of the batch."""
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as unfit:
            kind = "dict are keyword" if kwargs else "tuple are positional"
            raise TypeError(
                f"{type(model).__name__}.forward does not take the batch ({unfit}): entries of a {kind} arguments of "
                "forward; give another batch, or loss=lambda model, batch: ..."
            ) from error
        raise


def _check_scalar(value: object, batch: FlatBatch, loss: Loss | None) -> None:
    if value is None and loss is None and "labels" not in batch.tensors:
        raise ValueError(
            "the model returned no loss. A transformers model computes it from 'labels', which the batch does not have "
            f"(it has {', '.join(map(repr, batch.tensors))}): add batch['labels'], or pass loss=..."
        )
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"the loss is a {type(value).__name__}; pass loss=... or return a tensor or an output with .loss"
        )
    if value.ndim != 0 or not value.is_floating_point():
        raise ValueError(f"the loss must be a 0-d floating tensor, not {value.dtype} of shape {tuple(value.shape)}: "
                         "take its mean(), or give loss=lambda model, batch: ...")  # fmt: skip


class Recorder:
    """Marks nodes with phase and module path while they are traced.

    A backward node belongs to the module whose forward created its autograd node. Autograd numbers its nodes in order,
    so the numbers at which modules were entered and left tell the owner of each node.
    """

    def __init__(self, model: nn.Module):
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.born: list[int] = []  # autograd sequence numbers, ascending
        self.path_at: list[str] = []  # the current path from that number on
        self.regions = 0  # torch.utils.checkpoint regions so far

    @contextmanager
    def forward(self) -> Iterator[None]:
        stack = [""]

        def enter(module, args):
            stack.append(self.paths.get(id(module), stack[-1]))
            self._move(stack[-1])

        def leave(module, args, output):
            stack.pop()
            self._move(stack[-1])

        open_regions: list[int] = []

        def enter_region():
            self.regions += 1
            open_regions.append(self.regions)
            sign(checkpoint=open_regions[0])

        def leave_region():
            open_regions.pop()
            sign(checkpoint=open_regions[0] if open_regions else None)

        self._move("")
        handles = [
            module_hooks.register_module_forward_pre_hook(enter),
            module_hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            with compat.checkpoint_regions(enter_region, leave_region):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _move(self, path: str) -> None:
        sign(phase=FORWARD, path=path)
        self.born.append(compat.autograd_clock())
        self.path_at.append(path)

    @contextmanager
    def backward(self, nodes: Iterable[Any]) -> Iterator[None]:
        """Make each of these autograd nodes the current one while it runs."""
        handles = []
        sign(phase=BACKWARD, path="")
        for grad_fn in nodes:
            at = bisect_right(self.born, compat.born_at(grad_fn)) - 1
            path = self.path_at[at] if 0 <= at < len(self.path_at) else ""
            handles.append(grad_fn.register_prehook(lambda grads, path=path: sign(path=path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
