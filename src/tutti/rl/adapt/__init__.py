"""Adapters: environments of other libraries as a `tutti.rl.vector.VectorEnv`."""
