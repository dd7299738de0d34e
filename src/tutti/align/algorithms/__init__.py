"""Algorithms of alignment, one file each."""
