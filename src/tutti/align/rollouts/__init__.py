"""Completions by the model that is trained: engines, environments, placement."""
