"""Capture: a model, a batch and an optimizer become one StepGraph.

The step is executed once with fake tensors (no memory, no arithmetic) and traced: forward, `autograd.grad`,
optimizer update. Python control flow that does not depend on data is simply run.
"""

from __future__ import annotations

import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from tutti import compat
from tutti.graph import optimizers
from tutti.graph.build import build
from tutti.graph.functional import functionalize
from tutti.graph.garbage import uncollected
from tutti.graph.pattern_table import PATTERNS
from tutti.graph.patterns import Pattern
from tutti.graph.step_graph import BACKWARD, FORWARD, GUARD, UPDATE, StepGraph
from tutti.graph.trace import sign, trace

Batch = Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]
Loss = Callable[[nn.Module, Batch], torch.Tensor]
INSTEAD = (
    "decide it before the batch is made. On one device tutti.jit(model) runs it as it is, and its report() tells of "
    "all such places"
)
# What a model calls that asks for values itself: `if`, `.item()`, `.tolist()`; x[mask].
ASKED = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@uncollected()
def capture(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    *,
    clip_norm: float | None = None,
    masters: bool = False,
    stochastic_rounding: bool = False,
    gradients: bool = True,
    guarded: bool = False,
    patterns: Sequence[Pattern] = PATTERNS,
) -> StepGraph:
    """Record loss, gradients and optimizer update of one training step as one functional ATen graph.

    model: any module; on the meta device it costs no memory. Its training mode is respected.
    batch: a dict (passed as keyword arguments) or a tuple of tensors; only shapes and dtypes matter.
    optimizer: a `torch.optim` instance over the model's parameters; without one the graph ends at the gradients.
    loss: `loss(model, batch) -> 0-d tensor`; by default the model is called and its output has a `.loss` or is it.
    clip_norm: clip the global norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does.
    masters: keep and update float32 copies of low-precision parameters with the optimizer state.
    stochastic_rounding: bfloat16 parameters and their optimizer state are updated in float32 and rounded at random, on
        average to what they would be.
    gradients: False records the forward pass only.
    guarded: parameters and optimizer state stay what they were where loss or gradients are not finite; the output
        `skipped`, a 0-d float32 tensor, then is 1.
    patterns: what becomes fused operators where a model writes it out (`graph.patterns`); () leaves all as written.

    An enclosing `torch.autocast` is recorded with the graph. Checks of values, as the one for singular matrices behind
    `torch.linalg.solve`, are not: there the result is infinite or NaN. Raises ValueError where the loss is not a
    floating 0-d tensor, nothing requires a gradient, or the model branches on the values of a tensor.
    """
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    device = device_of(model)
    trained = [name for name, p in params.items() if p.requires_grad] if gradients else []
    if gradients and not trained:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(f"the optimizer is a {kind}, not of torch.optim: capture takes model, batch, optimizer")
    if optimizer is not None:
        optimizers.check(optimizer)
    if clip_norm is not None and optimizer is None:
        raise ValueError(f"clip_norm={clip_norm} clips the gradients that an update takes: give an optimizer, too")
    if masters and stochastic_rounding:
        raise ValueError("masters are kept in float32, where nothing is to be rounded: masters or stochastic_rounding")
    if stochastic_rounding and not any(params[name].dtype is torch.bfloat16 for name in trained):
        raise ValueError("stochastic_rounding is of bfloat16 parameters, and none of those that are trained is one")
    scored = _Scored(model, loss)

    def step(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        recorder = _Recorder(model)
        leaves = {name: inputs[f"param:{name}"].detach().requires_grad_() for name in trained}
        tensors = {f"model.{name}": leaves.get(name, inputs[f"param:{name}"]) for name in params}
        tensors |= {f"model.{name}": inputs[f"buffer:{name}"].clone() for name in buffers}
        with recorder.forward():
            value = torch.func.functional_call(scored, tensors, (_refill(batch, inputs),), tie_weights=True)
        _check_scalar(value, batch, loss)
        if gradients and not value.requires_grad:
            raise ValueError(
                "the loss does not depend on any parameter that requires a gradient; is it computed under "
                "torch.no_grad() or from a detached tensor?"
            )
        outputs = {"loss": value.detach()}
        outputs |= {f"buffer:{name}": tensors[f"model.{name}"] for name in buffers}
        if gradients:
            with recorder.backward(value):
                values = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            grads = {name: g for name, g in zip(leaves, values, strict=True) if g is not None}
            if guarded:
                sign(phase=BACKWARD, path=GUARD)
                grads = optimizers.poisoned(grads, value.detach())
            outputs |= {f"grad:{name}": g for name, g in grads.items()}
            if optimizer is not None:
                outputs |= _update(optimizer, params, grads, state, inputs, clip_norm, guarded, stochastic_rounding)
        return outputs

    with compat.fake_mode(), _fused_experts(model):

        def fakes(kind: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            return {f"{kind}:{k}": torch.empty(t.shape, dtype=t.dtype, device=device) for k, t in tensors}

        inputs = fakes("param", params.items()) | fakes("buffer", buffers.items())
        state = {}
        if optimizer is not None:
            names = {p: name for name, p in params.items()}
            state = optimizers.state_of(optimizer, names, masters)
            for name, tensors in state.items():
                inputs |= {
                    f"{kind}:{name}": torch.empty(t.shape, dtype=t.dtype, device=device) for kind, t in tensors.items()
                }
            inputs |= {f"lr:{i}": torch.empty((), dtype=torch.float64) for i in range(len(optimizer.param_groups))}
        inputs |= fakes("batch", batch_items(batch))
        inputs |= {name: torch.empty((), dtype=torch.int64) for name in ("step", "seed")}
        results: list[str] = []

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = step(dict(zip(inputs, tensors, strict=True)))
            results[:] = outputs
            return tuple(outputs.values())

        try:
            traced = functionalize(trace(flat, *inputs.values()), list(inputs.values()))
        except compat.ValuesNeeded as error:
            raise _branching(error) from error
        except RuntimeError as error:
            if ".numpy() is not supported for tensor subclasses" not in str(error):
                raise
            raise ValueError(
                f"{_asked_at(error)}the model takes the values of a tensor out of PyTorch (.numpy()), where no graph "
                f"follows them: {INSTEAD}"
            ) from error
    return build(traced, list(inputs), results, device, patterns)


def batch_items(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a batch with their keys; positions count as keys in a tuple."""
    if isinstance(batch, torch.Tensor):
        raise ValueError("the batch is a tensor; give a dict (keyword arguments of the model) or a tuple of tensors")
    if not isinstance(batch, Mapping | tuple | list):
        raise ValueError(f"the batch is a {type(batch).__name__}; a batch is a dict or tuple of tensors")
    items = batch.items() if isinstance(batch, Mapping) else ((str(i), v) for i, v in enumerate(batch))
    items = [(str(k), v) for k, v in items]
    for key, value in items:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"batch entry {key!r} is a {type(value).__name__}; a batch is a dict or tuple of tensors")
    return items


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU for a model on the meta device."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def _refill(batch: Batch, inputs: dict[str, torch.Tensor]) -> Batch:
    if isinstance(batch, Mapping):
        return {key: inputs[f"batch:{key}"] for key in batch}
    return tuple(inputs[f"batch:{i}"] for i in range(len(batch)))


def _update(optimizer, params, grads, state, inputs, clip_norm, guarded, stochastic) -> dict[str, torch.Tensor]:
    """The optimizer's update of every parameter that has a gradient, as named outputs."""
    sign(phase=UPDATE, path=GUARD if clip_norm is None else "")
    norm = None if clip_norm is None and not guarded else optimizers.global_norm(list(grads.values()))
    sign(path="")
    scale = None if norm is None or clip_norm is None else optimizers.clip_scale(norm, clip_norm)
    names = {p: name for name, p in params.items()}
    sign(path=GUARD)
    skip = None if norm is None or not guarded else optimizers.not_finite(norm)
    sign(path="")
    outputs = {} if skip is None else {"skipped": skip}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = names[param]
            if name not in grads:
                continue
            sign(path=name.rpartition(".")[0])
            old = {kind: inputs[f"{kind}:{name}"] for kind in state.get(name, {})}
            numbers = inputs["step"], inputs[f"lr:{i}"], skip, scale, stochastic
            new, new_state = optimizers.update(optimizer, group, inputs[f"param:{name}"], grads[name], old, *numbers)
            outputs[f"param:{name}"] = new
            outputs |= {f"{kind}:{name}": value for kind, value in new_state.items()}
    return outputs


def _fused_experts(model: nn.Module) -> AbstractContextManager:
    """Experts of transformers' models, where they are left at its default, are those of tutti.models.experts."""
    if "transformers.integrations.moe" not in sys.modules:
        return nullcontext()
    from tutti.models.experts import taken_by_default

    return taken_by_default(model)


def _asked_at(error: Exception) -> str:
    """The last line of an error's traceback that is neither ours nor PyTorch's."""
    ours = (Path(torch.__file__).parent, Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    asked = [f for f in frames if not any(folder in Path(f.filename).parents for folder in ours)]
    return f"{asked[-1].filename}:{asked[-1].lineno}, `{asked[-1].line}`: " if asked else ""


def _branching(error: Exception) -> ValueError:
    """What to say where the model asked for the values of a tensor: its own line, and what to do."""
    where = _asked_at(error)
    operator = getattr(error, "func", None)
    if operator not in ASKED:
        return ValueError(
            f"{where}the operator {operator} looks at the values of a tensor, for a shape or a number that it needs. A "
            "step is captured once for all values: compute it before the batch is made, or write an operator around it "
            "that knows its shapes without (torch.library.custom_op with register_fake)"
        )
    experts = "; for experts: import tutti.models.experts, then model.set_experts_implementation('tutti')"
    hint = INSTEAD + (experts if "expert" in where else "")
    return ValueError(
        f"{where}the model branches on the values of a tensor, or makes a shape of them ({error}). A step is captured "
        f"once for all values: write torch.where or a mask for an if, a loop, .item() or x[mask], or {hint}"
    )


def _check_scalar(value: object, batch: Batch, loss: Loss | None) -> None:
    keys = [key for key, _ in batch_items(batch)]
    if value is None and loss is None and "labels" not in keys:
        raise ValueError(
            "the model returned no loss. Models of transformers compute it from 'labels', which the batch does not "
            f"have (it has {', '.join(map(repr, keys))}): add batch['labels'], or pass loss=..."
        )
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"the loss is a {type(value).__name__}; pass loss=... or return a tensor or an output with .loss"
        )
    if value.ndim != 0 or not value.is_floating_point():
        raise ValueError(f"the loss must be a 0-d floating tensor, not {value.dtype} of shape {tuple(value.shape)}")


class _Scored(nn.Module):
    """The model together with its loss, as one module from batch to scalar."""

    def __init__(self, model: nn.Module, loss: Loss | None):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Batch) -> object:
        if self.loss is not None:
            return self.loss(self.model, batch)
        output = self.model(**batch) if isinstance(batch, Mapping) else self.model(*batch)
        if isinstance(output, Mapping):
            return output.get("loss")
        return getattr(output, "loss", output)


class _Recorder:
    """Signs nodes with phase and module path as they are traced.

    A backward node belongs to the module whose forward made its autograd node: autograd numbers its nodes in order,
    so the numbers at which modules were entered and left tell whose each node is.
    """

    def __init__(self, model: nn.Module):
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.born: list[int] = []  # autograd sequence numbers, ascending
        self.path_at: list[str] = []  # the path that was current from then on

    @contextmanager
    def forward(self) -> Iterator[None]:
        stack = [""]

        def enter(module, args):
            stack.append(self.paths.get(id(module), stack[-1]))
            self._move(stack[-1])

        def leave(module, args, output):
            stack.pop()
            self._move(stack[-1])

        self._move("")
        handles = [
            module_hooks.register_module_forward_pre_hook(enter),
            module_hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _move(self, path: str) -> None:
        sign(phase=FORWARD, path=path)
        self.born.append(compat.autograd_clock())
        self.path_at.append(path)

    @contextmanager
    def backward(self, value: torch.Tensor) -> Iterator[None]:
        """Make each autograd node, when it runs, the current one."""
        handles = []
        sign(phase=BACKWARD, path="")
        for grad_fn in compat.in_backward_order(value.grad_fn):
            at = bisect_right(self.born, compat.born_at(grad_fn)) - 1
            path = self.path_at[at] if 0 <= at < len(self.path_at) else ""
            handles.append(grad_fn.register_prehook(lambda grads, path=path: sign(path=path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
