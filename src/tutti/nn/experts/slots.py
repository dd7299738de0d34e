"""Experts of a fixed capacity: assign tokens to slots, and move them into the slots and back.

Each group of S tokens (a sequence) has C slots for each of E experts. Slots are assigned to the first choices of all
tokens in order, then to the second choices, and so on (GShard, Lepikhin et al. 2021, algorithm 1); choices without a
free slot are dropped. Groups are never split, so the same tokens are dropped under every plan.

| operator | | |
|---|---|---|
| slots | index (G, S, k) int64 -> slot (G, S, k) int64 | e C + place; -1 where dropped |
| dispatch | x (G, S, H), slot, weight -> buffer (G, E, C, H) | zero in empty slots |
| combine | buffer, slot, weight -> y (G, S, H) | dropped choices add nothing |
| slot_products | x, buffer, slot -> (G, S, k) | x[g, s] . buffer[g, slot[g, s, j]], 0 where dropped |

    buffer[g, slot[g, s, j]] = weight[g, s, j] x[g, s]        y[g, s] = sum_j weight[g, s, j] buffer[g, slot[g, s, j]]

An omitted weight is 1. dispatch and combine are adjoint: each is the other's gradient; `slot_products` is the gradient
of weights. `first`: the buffer starts at this expert; slots of other experts are ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.once import differentiable_once

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("slots(Tensor index, int experts, int capacity) -> Tensor")
_library.define("dispatch(Tensor x, Tensor slot, Tensor? weight, int experts, int capacity, int first=0) -> Tensor")
_library.define("combine(Tensor buffer, Tensor slot, Tensor? weight, int first=0) -> Tensor")
_library.define("slot_products(Tensor x, Tensor buffer, Tensor slot, int first=0) -> Tensor")
ops = torch.ops.tutti


def _slots(index: Tensor, experts: int, capacity: int) -> Tensor:
    groups, _, choices = index.shape
    asked = index.transpose(1, 2).flatten(1)  # (G, k S): all first choices, then all second ones
    expert, order = asked.sort(dim=1, stable=True)
    begins = torch.searchsorted(expert, torch.arange(experts, device=index.device).expand(groups, -1).contiguous())
    place = torch.arange(expert.shape[1], device=index.device) - begins.gather(1, expert)
    slot = torch.where(place < capacity, expert * capacity + place, -1)
    return torch.empty_like(asked).scatter_(1, order, slot).unflatten(1, (choices, -1)).mT.contiguous()


def _dispatch(x, slot, weight, experts, capacity, first=0):
    (groups, tokens, choices), width = slot.shape, x.shape[-1]
    rows, taken = _rows(slot, experts * capacity, first * capacity)
    owner = torch.arange(groups * tokens, device=x.device).repeat_interleave(choices)[taken]
    rows_of_tokens = x.flatten(0, 1).index_select(0, owner)
    if weight is not None:
        rows_of_tokens = rows_of_tokens * weight.flatten()[taken].unsqueeze(1).to(x.dtype)
    buffer = x.new_zeros((groups * experts * capacity, width))
    return buffer.index_copy_(0, rows[taken], rows_of_tokens).view(groups, experts, capacity, width)


def _combine(buffer, slot, weight, first=0):
    (groups, experts, capacity, width), (_, tokens, choices) = buffer.shape, slot.shape
    rows, taken = _rows(slot, experts * capacity, first * capacity)
    rows, taken = rows.view(-1, choices), taken.view(-1, choices, 1)
    if weight is not None:
        weight = weight.reshape(-1, choices, 1)
    y, buffer = torch.zeros((), dtype=_wide(buffer), device=buffer.device), buffer.reshape(-1, width)
    for j in range(choices):
        part = buffer.index_select(0, rows[:, j]).to(y.dtype).masked_fill(~taken[:, j], 0)
        y = y + (part if weight is None else part * weight[:, j])
    return y.view(groups, tokens, width).to(buffer.dtype)


def _slot_products(x, buffer, slot, first=0):
    (_, experts, capacity, width), choices = buffer.shape, slot.shape[-1]
    rows, taken = _rows(slot, experts * capacity, first * capacity)
    x, buffer, rows = x.reshape(-1, width), buffer.reshape(-1, width), rows.view(-1, choices)
    wide = _wide(x)
    parts = [torch.linalg.vecdot(x.to(wide), buffer.index_select(0, r).to(wide)) for r in rows.unbind(1)]
    return torch.stack(parts, 1).masked_fill(~taken.view(-1, choices), 0).view(slot.shape).to(x.dtype)


def _rows(slot: Tensor, capacity: int, before: int) -> tuple[Tensor, Tensor]:
    """For all choices: the row in a buffer with `held` rows per group, and whether it is in the buffer."""
    slot = slot - before
    taken = (slot >= 0) & (slot < capacity)
    rows = torch.where(taken, slot, 0) + capacity * torch.arange(len(slot), device=slot.device).view(-1, 1, 1)
    return rows.flatten(), taken.flatten()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


for _device in ("CPU", "CUDA"):
    _library.impl("slots", _slots, _device)
    _library.impl("dispatch", _dispatch, _device)
    _library.impl("combine", _combine, _device)
    _library.impl("slot_products", _slot_products, _device)

torch.library.register_fake("tutti::slots", lambda index, experts, capacity: torch.empty_like(index).contiguous())
torch.library.register_fake(
    "tutti::dispatch",
    lambda x, slot, weight, experts, capacity, first=0: x.new_empty((len(x), experts, capacity, x.shape[-1])),
)
torch.library.register_fake(
    "tutti::combine", lambda buffer, slot, *rest: buffer.new_empty((*slot.shape[:2], buffer.shape[-1]))
)
torch.library.register_fake("tutti::slot_products", lambda x, buffer, slot, first=0: x.new_empty(slot.shape))


def _save_dispatch(ctx, inputs, output) -> None:
    x, slot, weight, *_, ctx.first = inputs
    ctx.save_for_backward(x, slot, weight)


def _dispatch_gradients(ctx, grad):
    x, slot, weight = ctx.saved_tensors
    gweight = None if weight is None else ops.slot_products(x, grad, slot, ctx.first).to(weight.dtype)
    return ops.combine(grad, slot, weight, ctx.first), None, gweight, None, None, None


def _save_combine(ctx, inputs, output) -> None:
    buffer, slot, weight, ctx.first = inputs
    ctx.shape = buffer.shape[1:3]
    ctx.save_for_backward(buffer if weight is not None else None, slot, weight)


def _combine_gradients(ctx, grad):
    buffer, slot, weight = ctx.saved_tensors
    gweight = None if weight is None else ops.slot_products(grad, buffer, slot, ctx.first).to(weight.dtype)
    return ops.dispatch(grad, slot, weight, *ctx.shape, ctx.first), None, gweight, None


torch.library.register_autograd("tutti::dispatch", _dispatch_gradients, setup_context=_save_dispatch)
torch.library.register_autograd("tutti::combine", _combine_gradients, setup_context=_save_combine)
differentiable_once("the gradient of weights of dispatch and combine", "slot_products")
