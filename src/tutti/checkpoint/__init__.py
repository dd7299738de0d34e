"""Checkpoints: the logical tensors of a training state, whoever held them, for whoever is going to."""
