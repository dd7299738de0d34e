"""Experts of a fixed capacity."""

import torch

from tutti.check.samples.sample import Draw, samples

ops = torch.ops.tutti


def drawn(d: Draw):
    """Slots of a mixture's choices; experts, capacity and width."""
    groups, tokens, choices = d.size((2, 3, 4)), d.size((2, 4, 6)), d.size((1, 2))
    experts, capacity = d.size((2, 4, 6)), d.size((1, 2, 3))
    index = d.integers(groups, tokens, choices, below=experts)
    return ops.slots(index, experts, capacity), experts, capacity, d.size((1, 2, 4))


@samples(ops.slots.default)
def slots(d: Draw):
    experts = d.size((2, 4))
    return (d.integers(d.size((2, 4)), d.size((4, 6)), d.size((1, 2)), below=experts), experts, d.size((1, 2))), {}


@samples(ops.dispatch.default)
def dispatch(d: Draw):
    slot, experts, capacity, width = drawn(d)
    x = d.floats(*slot.shape[:2], width, dtype=torch.float64)
    return (x, slot, d.floats(*slot.shape, dtype=x.dtype) if d.flag() else None, experts, capacity), {}


@samples(ops.combine.default)
def combine(d: Draw):
    slot, experts, capacity, width = drawn(d)
    buffer = d.floats(len(slot), experts, capacity, width, dtype=torch.float64)
    return (buffer, slot, d.floats(*slot.shape, dtype=buffer.dtype) if d.flag() else None), {}


@samples(ops.slot_products.default)
def slot_products(d: Draw):
    slot, experts, capacity, width = drawn(d)
    buffer = d.floats(len(slot), experts, capacity, width, dtype=torch.float64)
    return (d.floats(*slot.shape[:2], width, dtype=torch.float64), buffer, slot), {}
