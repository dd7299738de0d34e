"""Algorithms, one in each file."""
