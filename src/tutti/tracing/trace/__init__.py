"""Tracing: record operators, and handle Python state, branches and loops."""
