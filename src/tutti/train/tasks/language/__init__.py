"""Tasks on text."""
