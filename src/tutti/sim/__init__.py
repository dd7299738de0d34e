"""The simulated runtime: Programs on fake tensors and a clock. Allocates nothing and needs no device."""
