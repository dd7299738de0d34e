"""Materials: update coefficients, dispersion, subpixel averages, absorbing layers."""
