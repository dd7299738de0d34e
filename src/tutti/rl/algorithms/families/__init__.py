"""Families of algorithms: on-policy, off-policy, offline, actor-critic."""
