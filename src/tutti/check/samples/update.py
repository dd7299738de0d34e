"""Optimizer updates."""

import torch

import tutti.nn.adam
import tutti.nn.quantized.rounding  # noqa: F401  (registers the operators)
from tutti.check.samples.sample import Draw, samples

ops = torch.ops.tutti


@samples(ops.adam.default, ops.adam_amsgrad.default)
def adam(d: Draw, target):
    shape = d.shape(0, 3)
    state = [d.positive(*shape) for _ in range(2 if target is ops.adam.default else 3)]
    numbers = torch.tensor(d.between(1, 9)), torch.tensor(0.1, dtype=torch.float64)
    optional = torch.tensor(float(d.flag())) if d.flag() else None, torch.tensor(0.5) if d.flag() else None
    options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": d.pick([0.0, 0.1])}
    tensors = d.floats(*shape, dtype=torch.float64), d.floats(*shape, dtype=torch.float64)
    return (*tensors, *state, *numbers, *optional), {**options, "decoupled": d.flag(), "maximize": d.flag()}


@samples(ops.round_stochastically.default)
def round_stochastically(d: Draw):
    shape = d.shape(0, 3)
    return (d.floats(*shape, dtype=torch.float32), d.positive(*shape, dtype=torch.float32) % 1), {}


@samples(ops.round_to_nearest.default)
def round_to_nearest(d: Draw):
    return (d.floats(*d.shape(0, 3), dtype=torch.float32),), {}
