"""Optimizer updates, elementwise over the parameter, with step and learning rate as scalars; and rounding."""

import torch

import tutti.nn.adam
import tutti.nn.quantized.rounding  # noqa: F401  (registers the operators)
from tutti.ops.pointwise import pointwise
from tutti.ops.registry import rules

ops = torch.ops.tutti

ROUNDING = (ops.round_stochastically.default, ops.round_to_nearest.default)
rules(dict.fromkeys((ops.adam.default, ops.adam_amsgrad.default, *ROUNDING), pointwise))
