"""Environments written as pure functions on batched tensors."""
