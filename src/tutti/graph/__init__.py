"""Capture: a training step as one graph of ATen operators, and what is known of it."""

import tutti.graph.simpler  # noqa: F401  (what a capture writes otherwise)
