"""Capture: trace Python code into one graph of ATen operators, and rewrite that graph."""
