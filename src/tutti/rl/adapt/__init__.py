"""Adapters: environments of other libraries as a `tutti.rl.core.vector.VectorEnv`. `make` chooses the one that fits."""

from tutti.rl.adapt.make import make as make
