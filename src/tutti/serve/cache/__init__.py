"""Attention over the paged cache of keys and values."""
