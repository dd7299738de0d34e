"""Environments with several agents: battles and particle worlds."""
