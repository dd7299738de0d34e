"""Algorithms that learn action values: DQN and its variants."""
