"""Losses whose logits or alignments are never stored whole."""
