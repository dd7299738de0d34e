"""Static analysis of Programs: the pass list, liveness, memory, prices, fusion."""
