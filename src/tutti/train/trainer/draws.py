"""The random numbers of data: those of collators and samplers, and the seeds of their workers."""

from __future__ import annotations

import random

import numpy as np
import torch

from tutti.train.values import NamedValues


class Draws:
    """Random numbers that only data draws: those of Python, NumPy and torch within `with draws:`.

    They begin with a seed. So all ranks make the same batches, whatever else one of them draws.
    """

    def __init__(self, seed: int) -> None:
        self.states: NamedValues = {
            "python": random.Random(seed).getstate(),
            "numpy": np.random.RandomState(seed % 2**32).get_state(),
            "cpu": torch.Generator().manual_seed(seed).get_state(),
        }

    def __enter__(self) -> None:
        self._outside = states()
        set_states(self.states)

    def __exit__(self, *error: object) -> None:
        self.states = states()
        set_states(self._outside)


def states() -> NamedValues:
    """The states of the random number generators that Python code draws from."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}


def set_states(states: NamedValues) -> None:
    """Restore what `states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
