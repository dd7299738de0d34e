"""Layouts of tensors, choices of operators, and what a step asks of them."""
