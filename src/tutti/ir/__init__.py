"""The graph of ATen operators, and the metadata of its nodes."""
