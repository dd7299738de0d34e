"""Reinforcement learning: environments, replay and algorithms as pure functions, compiled together."""
