"""Rewrites of a step's graph before it is cut and sharded."""
