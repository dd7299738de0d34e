"""Segments of Programs as functions that Inductor compiles."""
