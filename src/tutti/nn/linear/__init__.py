"""Linear layers of few rows, of quantized weights, and in low precision."""
