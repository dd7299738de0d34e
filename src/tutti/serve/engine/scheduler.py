"""The scheduler: which tokens the next step computes, and in which blocks of the cache.

Each step has a budget of tokens. Sequences that generate come first, with a token each (and drafts to verify); chunks
of prompts fill the rest. So prompts neither wait for a free engine nor delay the tokens of others (Agrawal et al.,
"Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve", 2024).

Requests run in the order of their priority; among equals, those of the account that was served least, and within it
of the user who was (Sheng et al., "Fairness in serving large language models", 2024); then as they came. If blocks run
out, the last sequence in this order is preempted: its blocks are copied to the host tier, or released and computed
again later.

Pure data structures: a step's blocks and moves are numbers, which the engine executes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tutti.serve.cache.blocks import BlockPool
from tutti.serve.engine.sequence import TokenSequence


class Piece(NamedTuple):
    """Tokens of a sequence that a step computes: `count` from position `start`, drafts included."""

    sequence: TokenSequence
    start: int
    count: int

    @property
    def ends(self) -> bool:
        """Whether it reaches the last token, so that the next can be chosen."""
        return self.start + self.count >= len(self.sequence.tokens)


class Move(NamedTuple):
    """A copy of a block: "copy" within the cache, "out" to a block on the host, "in" from one."""

    kind: str
    source: int
    target: int


@dataclass
class Batch:
    """What a step computes, after the moves, which are executed in order, and the encoder on sources."""

    pieces: list[Piece] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    sources: list[TokenSequence] = field(default_factory=list)
    encoded: int = 0  # positions of the sources
    tokens: int = field(init=False)  # of the pieces

    def __post_init__(self):
        self.tokens = sum(piece.count for piece in self.pieces)

    def add(self, piece: Piece) -> None:
        """Compute a piece, too."""
        self.pieces.append(piece)
        self.tokens += piece.count


class Scheduler:
    """Waiting and running sequences.

    pool: the blocks of the cache. host: blocks of the host tier; None if preempted sequences are computed again.
    budget: tokens in a step. most: sequences that run at once.
    """

    def __init__(self, pool: BlockPool, host: BlockPool | None, budget: int, most: int):
        if budget < most:
            raise ValueError(f"a step of {budget} tokens cannot hold a token of each of {most} sequences")
        self.pool, self.host, self.budget, self.most = pool, host, budget, most
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.served: Counter[tuple[str, ...]] = Counter()  # tokens, by account and by user
        self.preemptions = 0

    def add(self, sequence: TokenSequence) -> None:
        """A new sequence. It waits until there is room."""
        active = {party for x in self for party in _parties(x)}
        for party in _parties(sequence):
            equals = [self.served[x] for x in active if len(x) == len(party) and x[:-1] == party[:-1]]
            if equals and party not in active:  # time away earns no credit
                self.served[party] = max(self.served[party], min(equals))
        self.waiting.append(sequence)

    def place(self, sequence: TokenSequence, computed: int) -> bool:
        """Let a sequence run whose cache comes from elsewhere; whether there was room. Its blocks are then reserved."""
        needed, of_source = self.pool.needed(computed), self.pool.needed(sequence.slots)
        if sum(x.room for x in self.running) >= self.most or needed + of_source > self.pool.free:
            return False
        sequence.source_blocks = [self.pool.allocate() for _ in range(of_source)]
        sequence.blocks, sequence.computed = [self.pool.allocate() for _ in range(needed)], computed
        self.running.append(sequence)
        return True

    def join(self, sequence: TokenSequence) -> None:
        """A fork of a running sequence. It holds blocks already."""
        self.running.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """A sequence has ended, or is cancelled."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release_host(sequence)
        sequence.release(self.pool)
        active = {party for x in self for party in _parties(x)}
        for party in _parties(sequence):
            if party not in active:
                del self.served[party]

    def recompute(self) -> None:
        """Forget all contents of the cache, because the weights have changed: sequences are computed again."""
        for sequence in list(self.running):
            self.running.remove(sequence)
            self.waiting.append(sequence)
        for sequence in self.waiting:
            self._release_host(sequence)
            sequence.release(self.pool)
            sequence.forget_source()
        self.pool.forget_all()

    def restart(self, sequence: TokenSequence, factors: bytes) -> None:
        """Compute a sequence again, with other factors of its rotary embedding."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.append(sequence)
        self._release_host(sequence)
        sequence.release(self.pool)
        sequence.factors, sequence.chain = factors, []
        sequence.preempted += 1

    def schedule(self) -> Batch:
        """The next step. Its blocks are reserved."""
        batch = Batch()
        for sequence in sorted(self.running, key=lambda x: (x.wanted > 1 + len(x.drafts), self._rank(x))):
            if sequence in self.running and sequence.wanted and batch.tokens < self.budget:
                self._continue(sequence, batch)
        self._admit(batch)
        for piece in batch.pieces:
            for party in _parties(piece.sequence):
                self.served[party] += piece.count
        return batch

    def _rank(self, sequence: TokenSequence) -> tuple:
        """What comes first is smallest."""
        request, (account, user) = sequence.request, _parties(sequence)
        return request.priority, self.served[account], self.served[user], request.arrival, sequence.number

    def _continue(self, sequence: TokenSequence, batch: Batch) -> None:
        """Schedule what a running sequence wants, as far as the budget and the blocks go."""
        left = self.budget - batch.tokens
        if sequence.wanted > left:
            sequence.drafts = []
        count = min(sequence.wanted, left)
        while not self._reserve(sequence, count, batch):
            if sequence.drafts:
                count -= len(sequence.drafts)
                sequence.drafts = []
                continue
            victim = self._victim(batch)
            if victim is None:
                return  # it waits, with its blocks
            self._preempt(victim, batch)
            if victim is sequence:
                return
        batch.add(Piece(sequence, sequence.computed, count))

    def _victim(self, batch: Batch) -> TokenSequence | None:
        """The last running sequence, unless the step computes it."""
        last = max(self.running, key=self._rank)
        return None if any(piece.sequence is last for piece in batch.pieces) else last

    def _admit(self, batch: Batch) -> None:
        """Start waiting sequences while there is room for them."""
        while self.waiting and max(batch.tokens, batch.encoded) < self.budget:
            first = min(self.waiting, key=self._rank)
            while not self._start(first, batch):
                victim = max(self.running, key=self._rank, default=None)
                scheduled = any(piece.sequence is victim for piece in batch.pieces)
                if victim is None or scheduled or victim.request.priority <= first.request.priority:
                    return
                self._preempt(victim, batch)

    def _start(self, sequence: TokenSequence, batch: Batch) -> bool:
        """Make a waiting sequence run; whether there was room."""
        pool = self.pool
        if sum(x.room for x in self.running) + sequence.room > self.most:
            return False
        if sequence.swapped:
            cached, needed = [], len(sequence.swapped)
        else:
            cached = pool.find(sequence.digests(pool.size)[: (len(sequence.tokens) - 1) // pool.size])
            needed = 0
        start = sequence.computed if sequence.swapped else len(cached) * pool.size
        count = min(len(sequence.tokens) - start, self.budget - batch.tokens)
        needed = max(needed, pool.needed(start + count) - len(cached))
        source_blocks = self._source(sequence, start)
        fresh = pool.needed(sequence.slots) if source_blocks is None else 0
        revived = sum(not pool.ref_count[block] for block in (*cached, *(source_blocks or ())))
        if needed + fresh + revived > pool.free:
            return False
        for block in (*cached, *(source_blocks or ())):
            pool.acquire(block)
        sequence.source_blocks = [pool.allocate() for _ in range(fresh)] if source_blocks is None else source_blocks
        if source_blocks is None:
            assert sequence.source is not None
            batch.sources.append(sequence)
            batch.encoded += sequence.source.length
        sequence.blocks = list(cached)
        for host in sequence.swapped:
            sequence.blocks.append(pool.allocate())
            batch.moves.append(Move("in", host, sequence.blocks[-1]))
        self._release_host(sequence)
        sequence.computed, sequence.registered = start, len(cached)
        if not sequence.preempted:
            sequence.cached = start
        self._reserve(sequence, count, batch)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        batch.add(Piece(sequence, start, count))
        return True

    def _source(self, sequence: TokenSequence, start: int) -> list[int] | None:
        """The blocks of a sequence's source; None if its encoder must run. start: the first token to compute."""
        source = sequence.source
        if source is None or source.features is not None or (source.places is not None and source.places[-1] < start):
            return []
        cached = self.pool.find(source.digests(self.pool.size))
        return cached if cached and len(cached) == self.pool.needed(source.slots) else None

    def _reserve(self, sequence: TokenSequence, count: int, batch: Batch) -> bool:
        """Take the blocks that the next tokens are written to; False, and nothing has changed, if there are too few."""
        pool, first = self.pool, sequence.computed // self.pool.size
        fresh = max(0, pool.needed(sequence.computed + count) - len(sequence.blocks))
        shared = [i for i in range(first, len(sequence.blocks)) if not pool.is_own(sequence.blocks[i])]
        if fresh + len(shared) > pool.free:
            return False
        for i in shared:
            old, new = sequence.blocks[i], pool.allocate()
            if sequence.computed > i * pool.size:
                batch.moves.append(Move("copy", old, new))
            sequence.blocks[i] = new
            pool.release([old])
        sequence.blocks += [pool.allocate() for _ in range(fresh)]
        return True

    def _preempt(self, sequence: TokenSequence, batch: Batch) -> None:
        """Take the blocks of a running sequence away. It waits."""
        host, pool = self.host, self.pool
        filled = pool.needed(sequence.computed)
        self.running.remove(sequence)
        computed = sequence.computed
        if host and 0 < filled <= host.free:
            sequence.swapped = [host.allocate() for _ in range(filled)]
            batch.moves += [Move("out", a, b) for a, b in zip(sequence.blocks, sequence.swapped, strict=False)]
        sequence.release(pool)
        if sequence.swapped:
            sequence.computed = computed
        sequence.preempted += 1
        self.preemptions += 1
        self.waiting.append(sequence)

    def _release_host(self, sequence: TokenSequence) -> None:
        if self.host and sequence.swapped:
            self.host.release(sequence.swapped)
        sequence.swapped = []

    def __iter__(self) -> Iterator[TokenSequence]:
        """All sequences."""
        return iter([*self.running, *self.waiting])


def _parties(sequence: TokenSequence) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who is served with a sequence: an account, and a user of it."""
    request = sequence.request
    return (request.account,), (request.account, request.user)
