"""Algorithms that imitate an expert."""
