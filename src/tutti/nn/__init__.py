"""Operators and layers made for this project."""

from tutti.nn.moe import MoE as MoE
