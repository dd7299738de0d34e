"""What is known of a Program before it runs: the pass list, liveness, memory, prices, fusion."""
