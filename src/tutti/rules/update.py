"""Optimizer updates: elementwise over the parameter; step and learning rate are numbers."""

import torch

import tutti.nn.adam  # noqa: F401  (registers the operators)
from tutti.rules.pointwise import pointwise
from tutti.rules.registry import rules

ops = torch.ops.tutti

rules({ops.adam.default: pointwise, ops.adam_amsgrad.default: pointwise})
