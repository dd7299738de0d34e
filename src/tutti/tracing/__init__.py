"""Capture: from Python code to one graph of ATen operators, and what changes later."""
