"""Samples of operators with spatial dims."""
