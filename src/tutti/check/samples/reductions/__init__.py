"""Samples of operators that reduce or compare along a dim."""
