"""Drawing tokens: rows can be split, the vocabulary cannot."""

import torch

import tutti.nn.sample  # noqa: F401  (registers the operator)
from tutti.ops.registry import rules

rules({torch.ops.tutti.sample.default: "r v!, r, r, r, r, r -> r"})
