"""A sequence of tokens that the engine extends, and how far its KV cache is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tutti.serve.cache.blocks import BlockPool, Digest, digests
from tutti.serve.source import Source

if TYPE_CHECKING:
    from tutti.serve.engine.request import Request


@dataclass(eq=False)
class TokenSequence:
    """One continuation of a request.

    tokens: the prompt and what was generated. computed: number of leading tokens whose keys and values are in `blocks`.
    source: what the model's encoder reads, and `source_blocks` with what the decoder attends to.
    drafts: tokens guessed to follow, which the next step verifies. swapped: host blocks, while it is swapped out.
    room: number of sequences that it stands for until its forks exist.
    """

    request: Request
    number: int  # among the sequences of its request
    tokens: list[int]
    prompt: int  # number of tokens in the prompt
    salt: Digest = b""
    source: Source | None = None
    source_blocks: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    chain: list[Digest] = field(default_factory=list)  # of the full blocks of `tokens`
    registered: int = 0  # number of leading blocks that the pool knows
    preempted: int = 0  # how often
    room: int = 1
    cached: int = 0  # tokens of the prompt that were in the prefix cache
    score: float = 0.0  # sum of log-probabilities
    factors: bytes = b""  # of its rotary embedding, where that depends on the length (`rotary`)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt :]

    @property
    def wanted(self) -> int:
        """Number of tokens, with drafts, whose keys and values are not in the cache yet."""
        return len(self.tokens) + len(self.drafts) - self.computed

    @property
    def slots(self) -> int:
        """Slots of the cache for its source."""
        return self.source.slots if self.source else 0

    def digests(self, size: int) -> list[Digest]:
        """The digests of the full blocks of its tokens."""
        done = len(self.chain)
        own = self.salt + b"\0" + self.factors if self.factors else self.salt
        first = self.chain[-1] if self.chain else own
        self.chain += digests(self.tokens[done * size :], size, first)
        return self.chain

    def register(self, pool: BlockPool) -> None:
        """Let later sequences find the blocks that are full and computed."""
        full = min(self.computed, len(self.tokens)) // pool.size
        if full > self.registered:
            chain = self.digests(pool.size)
            for i in range(self.registered, full):
                pool.register(self.blocks[i], chain[i])
            self.registered = full

    def know_source(self, pool: BlockPool) -> None:
        """Let later sequences find the blocks of its source, which is computed."""
        for block, digest in zip(
            self.source_blocks, self.source.digests(pool.size) if self.source else [], strict=True
        ):
            pool.register(block, digest)

    def forget_source(self) -> None:
        """The encoder must run again."""
        if self.source:
            self.source.features = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""
        self.tokens.extend(tokens)

    def release(self, pool: BlockPool) -> None:
        """Let go of the cache."""
        pool.release(self.blocks)
        pool.release(self.source_blocks)
        self.source_blocks = []
        self.blocks, self.computed, self.registered, self.drafts = [], 0, 0, []

    def fork(self, pool: BlockPool, number: int) -> TokenSequence:
        """A second sequence with the same tokens and blocks; one whose blocks are on the host is computed again."""
        for block in (*self.blocks, *self.source_blocks):
            pool.acquire(block)
        return replace(self, number=number, tokens=list(self.tokens), computed=self.computed if self.blocks else 0,
                       source_blocks=list(self.source_blocks), blocks=list(self.blocks), drafts=[], swapped=[],
                       chain=list(self.chain), preempted=0, room=1, cached=0)  # fmt: skip
