"""Samples of operators of mixtures of experts."""
