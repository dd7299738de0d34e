"""Batches as a pure function of (seed, step): the step is the loader's only state."""

from dataclasses import dataclass

import numpy as np
import torch

_ROUNDS = 6


@dataclass(frozen=True)
class Loader:
    """Shuffled windows of `seq` tokens, `batch` of them a step; every window once an epoch.

    `tokens` is a 1-d array. Each epoch has its own order and its own offset of windows, so tokens at the edge of a
    window are inside one in another epoch.
    """

    tokens: np.ndarray
    batch: int
    seq: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.windows < 1:
            needed = 2 * self.seq
            raise ValueError(f"the corpus has {len(self.tokens)} tokens; windows of {self.seq} need at least {needed}")

    @property
    def windows(self) -> int:
        """Windows in an epoch: one fewer than fit, to leave room for the offset."""
        return len(self.tokens) // self.seq - 1

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step: input_ids and labels, (batch, seq) int64, equal (the model shifts them)."""
        epochs, places = np.divmod(np.arange(step * self.batch, (step + 1) * self.batch), self.windows)
        starts = np.empty(self.batch, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            offset = _mix(np.array([epoch], np.uint64), _key(self.seed, 0))[0] % np.uint64(self.seq)
            order = permute(places[here], self.windows, _key(self.seed, int(epoch) + 1))
            starts[here] = order * self.seq + np.int64(offset)
        return batch_at(self.tokens, starts, self.seq)


def held_out_batches(tokens: np.ndarray, batch: int, seq: int, count: int | None) -> list[np.ndarray]:
    """Start positions of the windows of `count` batches, (batch,) int64 each, evenly spaced; None: all that fit."""
    windows = len(tokens) // seq
    if windows < batch:
        raise ValueError(
            f"the held-out text has {windows} windows of {seq} tokens, fewer than a batch of {batch}; "
            "hold out more (data.held_out), or make the batch or the sequence smaller"
        )
    whole = windows // batch
    count = whole if count is None else min(count, whole)
    chosen = np.linspace(0, windows - 1, count * batch).astype(np.int64) * seq
    return list(chosen.reshape(count, batch))


def batch_at(tokens: np.ndarray, starts: np.ndarray, seq: int) -> dict[str, torch.Tensor]:
    """The windows that start at `starts`, as inputs of a transformers causal language model."""
    ids = torch.from_numpy(tokens[starts[:, None] + np.arange(seq)].astype(np.int64))
    return {"input_ids": ids, "labels": ids.clone()}


def permute(places: np.ndarray, n: int, key: np.uint64) -> np.ndarray:
    """The positions of `places` in a shuffle of range(n), without computing the shuffle.

    A Feistel network is a permutation of 2^(2h) numbers for any round function. Results of n or more are permuted again
    until they are less (cycle walking: Black and Rogaway 2002).
    """
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    x, outside = places.astype(np.uint64), np.ones(len(places), dtype=bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, key + np.uint64(turn)) & mask)
        x[outside] = (left << half) | right
        outside = x >= np.uint64(n)
    return x.astype(np.int64)


def _key(seed: int, epoch: int) -> np.uint64:
    """64 bits for this seed and epoch, with room for the rounds."""
    return np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(4)


def _mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014) over x and a key: 64 well-mixed bits."""
    z = x * np.uint64(0x9E3779B97F4A7C15) + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
