"""Rules of operators that reduce or compare along a dim: sums, norms, softmax, sorting, losses."""
