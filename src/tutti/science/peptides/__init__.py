"""Peptide design: a language model of peptides, asked for properties, and judged by an oracle it has not seen."""
