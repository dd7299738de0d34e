"""Formats of compressed models: compressed-tensors and GGUF."""
