"""Attention for prompts on a CPU, over a sequence that is split, and over the pages of a cache."""
