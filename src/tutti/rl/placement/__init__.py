"""Placements: where the fragments of an algorithm run, and what they cost."""
