"""Algorithms on policy: REINFORCE, A2C, PPO and relatives."""
