"""Compile segments of Programs with Inductor."""
