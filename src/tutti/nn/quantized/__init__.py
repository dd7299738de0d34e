"""Modules with quantized weights, and the schemes that quantize them."""
