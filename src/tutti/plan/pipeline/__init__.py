"""Pipelines: stages, slots, schedules, and where a model is cut."""
