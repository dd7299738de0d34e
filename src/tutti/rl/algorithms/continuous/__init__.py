"""Off-policy algorithms for continuous actions: DDPG, TD3, SAC and relatives."""
