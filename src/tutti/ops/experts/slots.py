"""Experts of a fixed capacity: groups, tokens and experts can be split.

Slots are assigned within a group, which is never split. If experts are split, each rank fills the slots of its own
experts from all tokens, and combines their results: a partial sum. If groups are split, a rank has all experts' slots
of its groups; the reshard to a buffer split by experts is an all-to-all (GShard, Lepikhin et al. 2021).
"""

from __future__ import annotations

import torch

import tutti.nn.experts.slots  # noqa: F401  (registers the operators)
from tutti.ir.op_info import LOCAL
from tutti.ir.step_graph import Call
from tutti.ops.registry import operands, rules

ops = torch.ops.tutti
DISPATCH, COMBINE, PRODUCTS = ops.dispatch.default, ops.combine.default, ops.slot_products.default


def _weighted(line: str):
    """The operands, with the weights if there are any."""

    def notation(node: Call) -> str:
        weight, linear = (", g s k", " ~2") if len(operands(node)) > 2 else ("", "")
        return line.format(weight) + linear

    return notation


rules(
    {
        ops.slots.default: "g s! k! -> g s! k!",
        DISPATCH: _weighted("g s h, g s k{} -> g e* c! h | ~0"),
        COMBINE: _weighted("g e* c! h, g s k{} -> g s h | ~0"),
        PRODUCTS: "g s h, g e* c! h, g s k -> g s k | ~0 ~1",
    }
)


def _dispatch_own(here, x, slot, weight, experts, capacity, first=0):
    return DISPATCH(x, slot, weight, here.size("e"), capacity, first + here.offset("e"))


def _combine_own(here, buffer, slot, weight, first=0):
    return COMBINE(buffer, slot, weight, first + here.offset("e"))


def _products_own(here, x, buffer, slot, first=0):
    return PRODUCTS(x, buffer, slot, first + here.offset("e"))


LOCAL |= {DISPATCH: _dispatch_own, COMBINE: _combine_own, PRODUCTS: _products_own}
