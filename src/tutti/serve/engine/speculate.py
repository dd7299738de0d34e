"""Speculative decoding: guess tokens cheaply, and verify them in one step.

A guess is accepted if it is the token that would have been chosen: tokens are drawn with a random number of their
position (`sampling.uniform`), so the output is the same as without guesses, token by token, at any temperature. A
draft model draws its guesses with the same numbers, which makes the two agree often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tutti.serve.engine.sequence import TokenSequence

# What the engine would choose after sequences that are followed by some drafts, from logits (rows, vocabulary).
Choose = Callable[[Sequence[tuple[TokenSequence, list[int]]], Tensor], list[int]]


class Guesser(Protocol):
    """Proposes tokens that follow those of each sequence."""

    def bind(self, budget: int, most: int, longest: int, vocabulary: int) -> None:
        """Called by the engine that uses it, with its sizes."""
        ...

    def guess(self, sequences: Sequence[TokenSequence], choose: Choose) -> list[list[int]]:
        """For each sequence, the guessed tokens."""
        ...


class PromptLookup:
    """Guesses that what followed the last tokens earlier follows them again (Saxena, "Prompt lookup decoding", 2023).

    count: number of guessed tokens. longest, shortest: lengths of the run of last tokens that is looked up.
    """

    def __init__(self, count: int = 4, longest: int = 4, shortest: int = 2):
        self.count, self.longest, self.shortest = count, longest, shortest
        self.seen: dict[TokenSequence, tuple[int, dict[tuple[int, ...], int]]] = {}

    def bind(self, budget: int, most: int, longest: int, vocabulary: int) -> None:
        """It needs nothing of the engine."""

    def guess(self, sequences: Sequence[TokenSequence], choose: Choose) -> list[list[int]]:
        """For each sequence, what followed its last tokens the last time."""
        self.seen = {x: self.seen.get(x, (0, {})) for x in sequences}
        return [self._after(x) for x in sequences]

    def _after(self, sequence: TokenSequence) -> list[int]:
        tokens, (done, places) = sequence.tokens, self.seen[sequence]
        for end in range(max(done, self.shortest), len(tokens)):  # runs that end before `end`
            for n in range(self.shortest, min(self.longest, end) + 1):
                places[tuple(tokens[end - n : end])] = end
        self.seen[sequence] = max(done, len(tokens)), places
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            if place := places.get(tuple(tokens[-n:])):
                return tokens[place : place + self.count]
        return []
