"""Numerical methods of the sciences: electromagnetics (`em`)."""
