"""Dropless experts whose tokens travel: an axis splits tokens and experts at once (`t&e`).

Each rank sends a token once to each other rank that has any of its experts, with its choices and their weights. That
rank computes what its experts add to it, and sends the sum back. The backward pass sends tokens and gradients, and gets
their gradients back. What travels depends on the data, so a rank first tells the others how many rows it sends.

With products in low precision, tokens and gradients travel to the experts in FP8; results travel back in their dtype.

Buffers have a fixed size, for all tokens of all ranks: no routing can overflow them, and memory is that of gathering
the tokens. Only the rows that are needed are sent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tutti.ir.op_info import SECONDS
from tutti.nn.fp8_rows import width_of
from tutti.nn.route import expected_rows, most_sent
from tutti.ops.registry import Cut

ops = torch.ops.tutti


class Travel:
    """The way of a rank's tokens to the experts and back. index: (T, k), of its tokens. own: experts of a rank."""

    def __init__(self, here, index: Tensor, own: int):
        (self.tokens, choices), self.parts = index.shape, here.parts("e")
        self.here, self.sent = here, most_sent(self.tokens, choices, self.parts)
        self.filled = expected_rows(self.tokens, choices, own, self.parts)
        self.expected = self.filled * (self.parts - 1) // self.parts
        self.slot, self.counts = ops.route(index, own, self.parts)
        once = torch.ones_like(self.counts)
        received = here.exchange(self.counts.unsqueeze(1), once, once, "e", self.parts, self.parts - 1)
        self.received = received.flatten()

    def there(self, x: Tensor, matmul: str = "") -> Tensor:
        """Rows of this rank's tokens -> rows of the tokens that use this rank's experts, zero behind the last. With
        products in low precision, rows travel in FP8."""
        rows = ops.send_rows(ops.fp8_rows(x) if matmul else x, self.slot, self.sent, self.filled)
        rows = self.here.exchange(rows, self.counts, self.received, "e", self.tokens * self.parts, self.expected)
        if not matmul:
            return rows
        dtype = str(x.dtype).removeprefix("torch.")
        return ops.rows_of_fp8(rows, self.received, x.shape[1], dtype, self.filled)

    def back(self, rows: Tensor) -> Tensor:
        """The sums over ranks of what they made for this rank's tokens."""
        rows = self.here.exchange(rows, self.received, self.counts, "e", self.sent, self.expected)
        return ops.add_rows(rows, self.slot, self.filled)

    def choices(self, index: Tensor, weight: Tensor, others: int) -> tuple[Tensor, Tensor]:
        """index and weight of the tokens that arrive, as one message. others: an expert of another rank, for the rows
        behind the last token."""
        wide, k = torch.promote_types(weight.dtype, torch.float32), index.shape[1]
        both = self.there(torch.cat([index.to(wide), weight.to(wide)], 1))
        empty = torch.arange(len(both), device=both.device) >= self.received.sum()
        index = torch.where(empty.unsqueeze(1), others, both[:, :k].to(index.dtype))
        return index, both[:, k:].to(weight.dtype)


def forward(target, here, x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul):
    begin = first + here.offset("e")
    travel = Travel(here, index, len(up))
    chosen = travel.choices(index, weight, (begin + len(up)) % total)
    options = (up, down, up_bias, down_bias, activation, begin, total, matmul, travel.filled)
    return travel.back(target(travel.there(x, matmul), *chosen, *options))


def backward(target, here, grad, x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul):
    begin = first + here.offset("e")
    travel = Travel(here, index, len(up))
    chosen = travel.choices(index, weight, (begin + len(up)) % total)
    options = (up, down, up_bias, down_bias, activation, begin, total, matmul, travel.filled)
    gx, gweight, *gradients = target(travel.there(grad, matmul), travel.there(x, matmul), *chosen, *options)
    return [travel.back(gx), travel.back(gweight), *gradients]


def sends(products: int):
    """Of a forward pass (1) or a backward pass (2)."""

    def sent(cut: Cut) -> list[tuple[str, int]]:
        if "&" not in cut.factor:
            return []
        x, index, weight = cut.inputs[products - 1 :][:3]
        (tokens, k), parts = index.shape, cut.k
        wide = torch.promote_types(weight.dtype or torch.float32, torch.float32).itemsize
        row = x.bytes // max(1, tokens)
        sent = width_of(x.shape[1]) if cut.node.args[9 + products] else row  # in low precision
        weights = k * (weight.bytes // max(1, weight.numel))
        moved = expected_rows(tokens, k, cut.inputs[products + 2].shape[0], parts) * (parts - 1) // parts
        rows = [8 * (parts - 1), moved * 2 * k * wide, *[moved * sent] * products, moved * row]
        return [("exchange", n) for n in (rows if products == 1 else [*rows, moved * weights])]

    return sent


def _seconds(device: Any, call: Any, place: int) -> float:
    """Each row that is filled is read and written once, whatever the size of the buffer."""
    rows, width = call.node.args[place], call.shapes()[0][1]
    return device.stream_seconds(2 * rows * width * call.dtype.itemsize, "add", call.dtype)


def _unpacking_seconds(device: Any, call: Any) -> float:
    _, _, width, _, filled = call.node.args
    return device.stream_seconds(filled * (width_of(width) + width * call.dtype.itemsize), "add", call.dtype)


SECONDS[ops.rows_of_fp8.default] = _unpacking_seconds
SECONDS |= {ops.send_rows.default: partial(_seconds, place=3), ops.add_rows.default: partial(_seconds, place=2)}
