"""Numerical methods of the sciences: electromagnetics (`em`), molecular dynamics (`mol`)."""
