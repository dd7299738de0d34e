"""Layouts, resharding, plans, the planner and the search."""
