"""From a Program to calls: generated code, native loops, joined rows, levels."""
