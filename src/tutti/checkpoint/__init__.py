"""Checkpoints: the logical tensors of a training state, saved and loaded under any plan."""
