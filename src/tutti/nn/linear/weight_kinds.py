"""Kinds of weights that the kernels of linear layers read, as numbers that `linear_rows.cpp` shares."""

SAME, INT8, INT4, INT3, INT2, CODES, FLOAT8 = range(7)  # SAME: in the dtype of x
