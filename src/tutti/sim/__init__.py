"""The simulated runtime: Programs on fake tensors and a clock. Nothing is allocated, no device is needed."""
