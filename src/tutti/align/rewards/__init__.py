"""Rewards: functions, models, verifiers, and the sandbox for code."""
