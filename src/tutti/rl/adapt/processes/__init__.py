"""Environments in processes of their own, with shared memory or Ray."""
