"""Methods of compression: calibration, rounding, rotation, pruning, low rank, distillation."""
