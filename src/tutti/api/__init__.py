"""What users call: `parallelize`, `function`, `Step`, `jit`."""
