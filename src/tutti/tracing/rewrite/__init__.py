"""Rewrites of traced graphs: functional form, simplification, fused operators."""
