"""Execution: runtimes, pipelines, stores, transfers between tiers, memory budget."""
