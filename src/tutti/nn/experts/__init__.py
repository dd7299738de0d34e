"""Mixtures of experts: routers, slots, and products of the rows of each expert."""
