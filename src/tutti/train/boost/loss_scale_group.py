"""A loss scale for each group of layers, which keeps gradients of all layers in the range of float16.

Layers are divided into n consecutive groups with scales s_1 ... s_n. Gradients in group i are s_i times the true ones:

    at the loss:                                     gradient <- s_n gradient
    where group i + 1 begins, towards group i:       gradient <- s_i / s_(i+1) gradient
    gradients of the parameters of group i:          gradient <- gradient / s_i, after they were computed

A step with gradients that are not finite is skipped, and the scales of the groups in which they are not finite are
halved. A scale is doubled after `interval` steps in a row without. `mindspore.boost.GroupLossScaleManager` scales at
the boundaries of groups in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, NestedIOFunction

from tutti.ir.kind import Kind
from tutti.tracing.batch import Batch
from tutti.train.boost.algorithm import Algorithm, Loss
from tutti.train.boost.layer_skip import layers_of
from tutti.train.values import NamedValues, Outputs

if TYPE_CHECKING:
    from tutti.api.step import Step

SCALES = "boost_loss_scales"  # a buffer of the model, float32 of shape (groups,)


@dataclass
class LossScaleGroup(Algorithm):
    """One dynamic loss scale per group of layers.

    groups: number of groups of the layers in the longest `nn.ModuleList`; what runs before them belongs to the first
        group, what runs after them to the last. All gradients must flow through the first argument of each layer.
    first: first value of all scales.
    interval: number of steps without an overflow after which a scale is doubled.
    largest: scales are not doubled beyond this.

    Scales are a buffer of the model, so that they are saved with the state of training, and change without a recapture.
    Skipped steps compute their gradients a second time, to find the groups. Steps that are skipped in a row raise an
    error as `max_nonfinite_steps` says, by default after 20.

    `prepare_model` raises NothingToDo if there is no list of layers, and ValueError for more groups than layers
    and for a parameter that modules of different groups share (tied embeddings).
    """

    groups: int = 2
    first: float = 2.0**16
    interval: int = 2000
    largest: float = 2.0**24
    _group_of: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _good: list[int] = field(default_factory=list, init=False, repr=False)
    _skipped: int = field(default=0, init=False, repr=False)

    def __post_init__(self):
        if self.groups < 1 or self.interval < 1 or not self.first > 0:
            raise ValueError(f"groups={self.groups!r}, interval={self.interval!r} and first={self.first!r} must be "
                             "positive")  # fmt: skip

    def prepare_model(self, model: nn.Module, batch: Batch, loss: Loss, steps: int | None = None) -> None:
        layers = list(layers_of(model, batch, loss, "loss_scale_group"))
        if self.groups > len(layers):
            raise ValueError(
                f"loss_scale_group has {self.groups} groups for {len(layers)} layers; give at most as many"
            )
        device = next(model.parameters()).device
        model.register_buffer(SCALES, torch.full((self.groups,), self.first, device=device), persistent=False)
        first_of = [i * len(layers) // self.groups for i in range(self.groups)]
        self._group_of = groups_of(model, batch, loss, [layers[i] for i in first_of[1:]])
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_hook(_Unscaled(model, self._group_of[name]))
        for group, start in enumerate(first_of[1:], start=1):
            layer = layers[start]
            cls = type(layer)
            layer.__class__ = type(cls.__name__, (_Boundary, cls), {"__module__": cls.__module__})
            layer.__dict__["boundary"] = _Ratio(model, group)
        self._good = [0] * self.groups

    def loss(self, loss: Loss) -> Loss:
        def scaled(model: nn.Module, batch: Batch) -> Outputs:
            value = loss(model, batch)
            if isinstance(value, tuple):
                return _Scale.apply(value[0], getattr(model, SCALES)[-1]), value[1]
            return _Scale.apply(value, getattr(model, SCALES)[-1])

        return scaled

    def options(self) -> NamedValues:
        return {"max_nonfinite_steps": 20}

    def after(self, step: Step, batch: Batch) -> None:
        bad = [False] * self.groups
        if step.skipped > self._skipped:
            for name, gradient in step.gradients(batch).items():
                bad[self._group_of[name]] |= not gradient.isfinite().all().item()
        self._skipped = step.skipped
        self.update(step, bad)

    def update(self, step: Step, overflowed: list[bool]) -> None:
        """Adapt the scales after a step in which the gradients of these groups were not finite."""
        self._good = [0 if bad else good + 1 for good, bad in zip(self._good, overflowed, strict=True)]
        if not any(overflowed) and self.interval not in self._good:
            return
        scales = step.store.whole(Kind.BUFFER.at(SCALES)).clone()
        for group, bad in enumerate(overflowed):
            if bad or self._good[group] == self.interval:
                scales[group] = scales[group] / 2 if bad else min(2 * scales[group].item(), self.largest)
                self._good[group] = 0
        step.store.place(Kind.BUFFER.at(SCALES), scales)


def groups_of(model: nn.Module, batch: Batch, loss: Loss, starts: list[nn.Module]) -> dict[str, int]:
    """The group of each parameter, by when its module runs. starts: the modules with which groups 1, 2, ... begin."""
    now, names = 0, {p: name for name, p in model.named_parameters()}
    groups: dict[str, int] = {}

    def see(module: nn.Module, args: tuple) -> None:
        nonlocal now
        now += module in starts
        for p in module.parameters(recurse=False):
            if groups.setdefault(names[p], now) != now:
                raise ValueError(f"loss_scale_group: modules of two groups share parameter {names[p]!r}, whose "
                                 "gradient then has no single scale; untie it or give groups=1")  # fmt: skip

    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(see).remove)
        loss(model, batch)
    return {name: groups.get(name, 0) for name in names.values()}


class _Scale(torch.autograd.Function):
    """x, whose gradient is multiplied by a 0-d tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: NestedIOFunction, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (scale,) = ctx.saved_tensors
        return (gradient.float() * scale).to(gradient.dtype), None


class _Unscaled:
    """A hook: divides the gradient of a parameter by the scale of its group."""

    def __init__(self, model: nn.Module, group: int):
        self.model, self.group = model, group

    def __call__(self, gradient: Tensor) -> Tensor:
        return (gradient.float() / getattr(self.model, SCALES)[self.group]).to(gradient.dtype)


class _Ratio:
    """The factor for gradients that leave a group towards the one before."""

    def __init__(self, model: nn.Module, group: int):
        self.model, self.group = model, group

    def __call__(self) -> Tensor:
        scales = getattr(self.model, SCALES)
        return scales[self.group - 1] / scales[self.group]


class _Boundary(nn.Module):
    """The first layer of a group: scales the gradient of its first argument."""

    boundary: Callable[[], Tensor]

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Outputs:
        return super().forward(_Scale.apply(x, self.boundary()), *args, **kwargs)
