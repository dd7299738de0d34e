"""Operators and layers of this project, usable in any PyTorch model."""

from tutti.nn.moe import MoE as MoE
