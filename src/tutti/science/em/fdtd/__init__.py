"""Finite differences in the time domain, with gradients."""
