"""A draft model: a smaller model of the same vocabulary guesses the next tokens (Leviathan et al., "Fast inference from
transformers via speculative decoding", 2023). Verification is that of `speculate`: the output does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tutti.serve.cache.blocks import BlockPool
from tutti.serve.engine.runner import Runner
from tutti.serve.engine.scheduler import Batch, Piece
from tutti.serve.engine.sequence import TokenSequence
from tutti.serve.engine.speculate import Choose


class DraftModel:
    """Guesses with a model.

    model: a causal language model with the vocabulary of the served one. count: number of guessed tokens. memory: bytes
    of its KV cache. options: those of `tutti.function`, such as plan and cluster.
    """

    def __init__(self, model: nn.Module, count: int = 4, memory: int = 256 << 20, **options: Any):
        self.model, self.count, self.memory = model.eval(), count, memory
        self.options = {"level": "O0", **options}
        self.shadows: dict[TokenSequence, TokenSequence] = {}  # with the same tokens, and blocks in the draft's cache

    def bind(self, budget: int, most: int, longest: int, vocabulary: int) -> None:
        """Called by the engine that uses it. Raises ValueError for another vocabulary."""
        own = self.model.config.get_text_config().vocab_size  # pyright: ignore
        if own != vocabulary:
            raise ValueError(f"the draft model has a vocabulary of {own} tokens, the model of {vocabulary}")
        self.runner = Runner(self.model, block=16, blocks=None, memory=self.memory, host_memory=0, budget=budget,
                             most=most, longest=longest, options=self.options)  # fmt: skip
        if self.runner.crosses:
            raise ValueError(f"{type(self.model).__name__} has an encoder; a draft model has none")
        self.pool = BlockPool(self.runner.blocks, 16, False)
        self.shadows = {}

    def guess(self, sequences: Sequence[TokenSequence], choose: Choose) -> list[list[int]]:
        """For each sequence, what the draft model would say."""
        for gone in self.shadows.keys() - set(sequences):
            self.shadows.pop(gone).release(self.pool)
        able = [x for x in sequences if self._reserve(x)]
        drafts: dict[TokenSequence, list[int]] = {x: [] for x in able}
        while any(self.shadows[x].wanted > 1 for x in able):
            self._catch_up(able)
        for _ in range(self.count if able else 0):
            logits = self._run([Piece(self.shadows[x], self.shadows[x].computed, 1) for x in able])
            for x, token in zip(able, choose([(x, drafts[x]) for x in able], logits), strict=True):
                drafts[x] = [*drafts[x], max(token, 0)]
                self.shadows[x].drafts = drafts[x]
                self.shadows[x].computed += 1
        for x in able:
            shadow = self.shadows[x]
            shadow.drafts, shadow.computed = [], len(x.tokens)
        return [drafts.get(x, []) for x in sequences]

    def _reserve(self, sequence: TokenSequence) -> bool:
        """BlockPool for the tokens of a sequence and the guesses; False if there are too few."""
        if sequence not in self.shadows:
            self.shadows[sequence] = replace(sequence, computed=0, blocks=[], drafts=[], swapped=[], factors=b"",
                                             source=None, source_blocks=[])  # fmt: skip
        shadow = self.shadows[sequence]
        shadow.tokens = sequence.tokens
        if self.runner.scaling:
            factors = self.runner.scaling.factors(shadow.prompt, len(shadow.tokens))
            if factors != shadow.factors:
                shadow.factors, shadow.computed = factors, 0
        shadow.computed = min(shadow.computed, len(sequence.tokens) - 1)
        length = len(sequence.tokens) + self.count
        missing = self.pool.needed(length) - len(shadow.blocks)
        if missing > self.pool.free or length > self.runner.longest:
            return False
        shadow.blocks += [self.pool.allocate() for _ in range(missing)]
        return True

    def _catch_up(self, able: Sequence[TokenSequence]) -> None:
        """Compute tokens that the draft model has not seen, except the last of each sequence."""
        pieces, left = [], self.runner.budget
        for shadow in (self.shadows[x] for x in able):
            count = min(shadow.wanted - 1, left)
            if count:
                pieces.append(Piece(shadow, shadow.computed, count))
                left -= count
        self._run(pieces)
        for shadow, _, count in pieces:
            shadow.computed += count

    def _run(self, pieces: list[Piece]) -> Tensor:
        """The logits after the last token of each piece."""
        rows, at = [], 0
        for piece in pieces:
            at += piece.count
            rows.append(at - 1)
        return self.runner.run(Batch(pieces), rows)
