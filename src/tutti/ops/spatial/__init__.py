"""Rules of operators with spatial dims: convolution, pooling, resampling, windows and rolls."""
