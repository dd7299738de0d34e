"""Constrained decoding, compiled in a process of its own."""
