"""Dropless experts whose tokens travel: an axis splits tokens and experts at once (`t&e`).

Each rank sends a token once to each other rank that has any of its experts, with its choices and their weights. That
rank computes what its experts add to it, and sends the sum back. The backward pass sends tokens and gradients, and gets
their gradients back. What travels depends on the data, so a rank first tells the others how many rows it sends.

If the plan says how many devices are in a node (`Plan.node_size`), a token goes once to each node that has any of its
experts, and there once to each device. On the way back, sums are taken in a node first.

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
from tutti.nn.experts.route import expected_rows, most_sent
from tutti.nn.linear.fp8_rows import width_of
from tutti.ops.registry import Cut

ops = torch.ops.tutti


class Leg:
    """An exchange of tokens between the ranks along some axes.

    index: (T, k), of the tokens that start here. own: experts of each of the ranks. begin: the first expert of the
    first rank, -1 if the ranks have all experts. arrive: rows that arrive here on average.
    """

    def __init__(self, here, axes: str, parts: int, index: Tensor, own: int, begin: int, arrive: int):
        (self.tokens, choices), self.parts = index.shape, parts
        self.here, self.axes, self.sent = here, axes, most_sent(self.tokens, choices, parts)
        self.filled, self.expected = arrive, arrive * (parts - 1) // parts
        self.slot, self.counts = ops.route(index, own, parts, begin)
        once = torch.ones_like(self.counts)
        self.received = here.exchange(self.counts.unsqueeze(1), once, once, axes, parts, parts - 1).flatten()

    def there(self, x: Tensor) -> Tensor:
        """Rows of the tokens that start here -> rows of those that arrive, zero behind the last."""
        rows = ops.send_rows(x, self.slot, self.sent, self.filled)
        return self.here.exchange(rows, self.counts, self.received, self.axes, self.tokens * self.parts, self.expected)

    def back(self, rows: Tensor) -> Tensor:
        """The sums over ranks of what they made for the tokens that started here."""
        rows = self.here.exchange(rows, self.received, self.counts, self.axes, self.sent, self.expected)
        return ops.add_rows(rows, self.slot, self.filled)

    def choices(self, index: Tensor, weight: Tensor, others: int) -> tuple[Tensor, Tensor]:
        """index and weight of the tokens that arrive, as one message. others: an expert of another rank, for the rows
        behind the last token."""
        wide, k = torch.promote_types(weight.dtype, torch.float32), index.shape[1]
        both = self.there(torch.cat([index.to(wide), weight.to(wide)], 1))
        empty = torch.arange(len(both), device=both.device) >= self.received.sum()
        index = torch.where(empty.unsqueeze(1), others, both[:, :k].to(index.dtype))
        return index, both[:, k:].to(weight.dtype)


class Travel:
    """The way of a rank's tokens to the experts and back, in one or two legs.

    index, weight: (T, k), of its tokens; afterwards of those that arrive. own: experts of a rank. begin: its first
    expert. filled: the tokens that arrive on average.
    """

    def __init__(self, here, index: Tensor, weight: Tensor, own: int, begin: int, total: int):
        self.legs: list[Leg] = []
        (tokens, k), ranks, first = index.shape, here.parts("e"), -1
        for axes, parts in here.legs("e"):
            ranks //= parts
            experts = own * ranks  # of each of these parts
            arrive = expected_rows(tokens, k, experts, total // experts, here.routing)
            leg = Leg(here, axes, parts, index, experts, first, arrive)
            first = begin // experts * experts
            index, weight = leg.choices(index, weight, (first + experts) % total)
            self.legs.append(leg)
        self.index, self.weight, self.filled = index, weight, self.legs[-1].filled

    def there(self, x: Tensor, matmul: str = "") -> Tensor:
        """Rows of this rank's tokens -> rows of the tokens that use this rank's experts. With products in low
        precision, rows travel in FP8."""
        rows = ops.fp8_rows(x) if matmul else x
        for leg in self.legs:
            rows = leg.there(rows)
        if not matmul:
            return rows
        dtype = str(x.dtype).removeprefix("torch.")
        return ops.rows_of_fp8(rows, self.legs[-1].received, x.shape[1], dtype, self.filled)

    def back(self, rows: Tensor) -> Tensor:
        """The sums over ranks of what they made for this rank's tokens."""
        for leg in reversed(self.legs):
            rows = leg.back(rows)
        return rows


def forward(target, here, x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul):
    begin = first + here.offset("e")
    travel = Travel(here, index, weight, len(up), begin, total)
    options = (up, down, up_bias, down_bias, activation, begin, total, matmul, travel.filled)
    return travel.back(target(travel.there(x, matmul), travel.index, travel.weight, *options))


def backward(target, here, grad, x, index, weight, up, down, up_bias, down_bias, activation, first, total, matmul):
    begin = first + here.offset("e")
    travel = Travel(here, index, weight, len(up), begin, total)
    options = (up, down, up_bias, down_bias, activation, begin, total, matmul, travel.filled)
    rows = travel.there(grad, matmul), travel.there(x, matmul)
    gx, gweight, *gradients = target(*rows, travel.index, travel.weight, *options)
    return [travel.back(gx), travel.back(gweight), *gradients]


def sends(products: int):
    """The messages of a pass. products: 1 for a forward, 2 for a backward pass."""

    def sent(cut: Cut) -> list[tuple[str, int]]:
        if "&" not in cut.factor:
            return []
        x, index, weight = cut.inputs[products - 1 :][:3]
        (tokens, k), own = index.shape, cut.inputs[products + 2].shape[0]
        wide = torch.promote_types(weight.dtype or torch.float32, torch.float32).itemsize
        row = x.bytes // max(1, tokens)
        there = width_of(x.shape[1]) if cut.node.args[9 + products] else row  # in low precision
        weights = k * (weight.bytes // max(1, weight.numel))
        legs = [("exchange", cut.k, cut.k)]  # kind, ranks of the leg, parts of the experts
        if cut.inside:
            nodes = cut.k // cut.inside
            legs = [(f"exchange/{cut.inside}", nodes, nodes), (f"exchange%{cut.inside}", cut.inside, cut.k)]
        messages = []
        for kind, ranks, parts in legs:
            arrive = expected_rows(tokens, k, own * cut.k // parts, parts, cut.node.meta.get("routing"))
            moved = arrive * (ranks - 1) // ranks
            rows = [8 * (ranks - 1), moved * 2 * k * wide, *[moved * there] * products, moved * row]
            messages += [(kind, n) for n in (rows if products == 1 else [*rows, moved * weights])]
        return messages

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
