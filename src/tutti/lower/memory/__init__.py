"""Memory of Programs: in-place updates, reuse, recomputation, tiers."""
