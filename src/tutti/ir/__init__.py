"""One functional graph of ATen operators, and what is known of each node."""
