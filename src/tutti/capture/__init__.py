"""Capture: a training step as one graph of ATen operators, and what is known of it."""
