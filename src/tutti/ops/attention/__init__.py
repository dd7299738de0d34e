"""Rules of attention: fused kernels, and attention over a paged cache."""
