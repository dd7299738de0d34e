"""Algorithms with a model of the environment: world models and tree search."""
