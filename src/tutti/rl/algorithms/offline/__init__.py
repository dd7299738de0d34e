"""Algorithms that learn from stored episodes."""
