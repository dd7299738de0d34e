"""Operators and layers of this project, usable in any PyTorch model."""

from tutti.nn.experts.moe import MoE

__all__ = ["MoE"]
