"""The scheduler against a simulated cache: every token reads what its sequence wrote, whatever happens between."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.serve.cache.blocks import BlockPool, digests
from tutti.serve.engine.request import Request, Sampling
from tutti.serve.engine.scheduler import Scheduler
from tutti.serve.engine.sequence import TokenSequence
from tutti.serve.source import Source

SIZE = 4


class Simulated:
    """A scheduler, and a cache that remembers which tokens each slot was computed after."""

    def __init__(self, blocks: int = 12, host: int = 0, budget: int = 8, most: int = 4, keep: bool = True):
        self.pool = BlockPool(blocks, SIZE, keep)
        self.host = BlockPool(host, SIZE, False) if host else None
        self.scheduler = Scheduler(self.pool, self.host, budget, most)
        self.cache: dict[tuple[str, int], list] = {}
        self.clock = itertools.count()

    def add(
        self, prompt: list[int], priority: int = 0, user: str = "", n: int = 1, account: str = "", read: int = 0
    ) -> TokenSequence:
        """read: positions of a source, which is another one for each number."""
        request = Request(prompt, Sampling(n=n), priority=priority, account=account, user=user,
                          arrival=next(self.clock))  # fmt: skip
        source = Source({"input_ids": torch.arange(read)}, read, read) if read else None
        salt = source.digest if source else b""
        sequence = TokenSequence(request, 0, list(prompt), len(prompt), salt, source, room=n)
        self.scheduler.add(sequence)
        return sequence

    def step(self, token: int = 0, drafts: int = 0, accepted: int = 0) -> None:
        """Compute a step, and extend what it finished by a token (and by accepted drafts)."""
        for sequence in self.scheduler.running:
            if sequence.wanted == 1:
                sequence.drafts = [7] * drafts
        batch = self.scheduler.schedule()
        assert batch.tokens <= self.scheduler.budget and len(batch.pieces) <= self.scheduler.most
        assert batch.pieces or not any(x.wanted for x in self.scheduler)
        for kind, source, target in batch.moves:
            places = {"copy": ("cache", "cache"), "out": ("cache", "host"), "in": ("host", "cache")}[kind]
            self.cache[places[1], target] = list(self.cache[places[0], source])
        for sequence in batch.sources:
            for block in sequence.source_blocks:
                assert self.pool.is_own(block), "a shared block is written"
                self.cache["cache", block] = [sequence.slots] * SIZE
            sequence.know_source(self.pool)
        for sequence, _, _ in batch.pieces:
            assert len(sequence.source_blocks) == self.pool.needed(sequence.slots)
            assert all(self.cache["cache", block] == [sequence.slots] * SIZE for block in sequence.source_blocks)
        written: Counter[int] = Counter()
        for sequence, start, count in batch.pieces:
            tokens = (sequence.tokens + sequence.drafts)[: start + count]
            assert start == sequence.computed and len(sequence.blocks) >= self.pool.needed(start + count)
            for position in range(start, start + count):
                block = sequence.blocks[position // SIZE]
                assert self.pool.is_own(block), "a shared block is written"
                written[block * SIZE + position % SIZE] += 1
                entry = self.cache.setdefault(("cache", block), [None] * SIZE)
                entry[position % SIZE] = tuple(tokens[: position + 1])
            for position in range(start + count):
                entry = self.cache["cache", sequence.blocks[position // SIZE]][position % SIZE]
                assert entry == tuple(tokens[: position + 1]), "the cache has other tokens"
        assert all(n == 1 for n in written.values())
        for piece in batch.pieces:
            sequence = piece.sequence
            good = min(accepted, len(sequence.drafts)) if piece.ends else 0
            sequence.computed = piece.start + piece.count - len(sequence.drafts) + good if piece.ends else (
                piece.start + piece.count)  # fmt: skip
            sequence.tokens += sequence.drafts[:good] + ([token] if piece.ends else [])
            sequence.drafts = []
            sequence.register(self.pool)
            if piece.ends and sequence.room > 1:
                for number in range(1, sequence.room):
                    fork = sequence.fork(self.pool, number)
                    fork.tokens[-1] = token + number
                    self.scheduler.join(fork)
                sequence.room = 1
        self.check()

    def check(self) -> None:
        """No block is leaked, and holders are counted."""
        holders = Counter(block for x in self.scheduler for block in (*x.blocks, *x.source_blocks))
        assert [holders[i] for i in range(self.pool.count)] == self.pool.ref_count
        assert set(self.pool.free_list) == {i for i, n in enumerate(self.pool.ref_count) if not n}
        assert len(self.scheduler.running) <= self.scheduler.most
        if self.host:
            host_holders = Counter(block for x in self.scheduler for block in x.swapped)
            assert [host_holders[i] for i in range(self.host.count)] == self.host.ref_count

    def end(self) -> None:
        for sequence in list(self.scheduler):
            self.scheduler.remove(sequence)
        self.check()
        assert self.pool.used == 0 and (self.host is None or self.host.used == 0)


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # few tokens: prefixes are often the same
ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        PROMPTS,
        st.integers(0, 2),
        st.sampled_from("ab"),
        st.integers(1, 3),
        st.sampled_from([0, 0, 3, 5]),
    ),
    st.tuples(st.just("step"), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 5)),
)


@settings(max_examples=200, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40), host=st.sampled_from([0, 6]), keep=st.booleans(),
       blocks=st.integers(6, 14))  # fmt: skip
def test_any_sequence_of_events(actions, host, keep, blocks):
    simulated = Simulated(blocks, host, keep=keep)
    most = blocks * SIZE
    for kind, *rest in actions:
        if kind == "add":
            prompt, priority, user, n, read = rest
            simulated.add(prompt, priority, user, n, read=read)
        elif kind == "step":
            simulated.step(*rest)
        elif sequences := list(simulated.scheduler):
            simulated.scheduler.remove(sequences[rest[0] % len(sequences)])
        for sequence in list(simulated.scheduler):
            if len(sequence.tokens) + 4 > most - simulated.pool.needed(sequence.slots) * SIZE:
                simulated.scheduler.remove(sequence)
        simulated.check()
    simulated.end()


def test_all_sequences_progress_when_blocks_are_scarce():
    simulated = Simulated(blocks=6, budget=4)
    sequences = [simulated.add([i] * 6) for i in range(4)]
    for _ in range(200):
        simulated.step()
        for sequence in list(simulated.scheduler):
            if len(sequence.tokens) >= 14:
                simulated.scheduler.remove(sequence)
    assert all(len(x.tokens) >= 14 for x in sequences) and simulated.scheduler.preemptions


def test_generating_sequences_are_not_delayed_by_prompts():
    simulated = Simulated(blocks=40, budget=8)
    first = simulated.add([1, 2])
    simulated.step()
    simulated.add([0] * 60)
    lengths = []
    for _ in range(5):
        simulated.step()
        lengths.append(len(first.tokens))
    assert lengths == [4, 5, 6, 7, 8]


def test_a_known_prefix_is_not_computed_again():
    simulated = Simulated(blocks=20, budget=40)
    first = simulated.add([1] * 13)
    simulated.step()
    simulated.scheduler.remove(first)
    again, other = simulated.add([1] * 9 + [2]), simulated.add([2] * 9)
    simulated.step()
    assert (again.cached, other.cached) == (8, 0)


def test_priority_preempts_and_goes_first():
    simulated = Simulated(blocks=8, most=2, budget=8)
    late = [simulated.add([i] * 8, priority=1) for i in range(3)]
    simulated.step()
    urgent = simulated.add([9] * 8)
    simulated.step()
    assert urgent in simulated.scheduler.running and late[2] in simulated.scheduler.waiting


def test_users_take_turns():
    simulated = Simulated(blocks=40, most=1, budget=8)
    greedy = [simulated.add([1] * 8, user="greedy") for _ in range(3)]
    modest = simulated.add([2] * 8, user="modest")
    simulated.step()
    simulated.scheduler.remove(greedy[0])
    simulated.step()
    assert simulated.scheduler.running == [modest]


def test_an_account_gains_nothing_by_many_users():
    simulated = Simulated(blocks=40, most=1, budget=8)
    many = [simulated.add([i] * 8, account="a", user=str(i)) for i in range(3)]
    modest = simulated.add([9] * 8, account="b")
    order = []
    while simulated.scheduler.waiting or simulated.scheduler.running:
        simulated.step()
        (running,) = simulated.scheduler.running
        order.append(running)
        simulated.scheduler.remove(running)
    assert order == [many[0], modest, many[1], many[2]] and not simulated.scheduler.served


def test_users_divide_what_their_account_gets():
    simulated = Simulated(blocks=40, most=1, budget=8)
    greedy = [simulated.add([1] * 8, account="a", user="greedy") for _ in range(3)]
    modest = simulated.add([2] * 8, account="a", user="modest")
    simulated.step()
    simulated.scheduler.remove(greedy[0])
    simulated.step()
    assert simulated.scheduler.running == [modest]


def test_swapped_blocks_come_back():
    simulated = Simulated(blocks=6, host=6, budget=8, most=2)
    first, second = simulated.add([1] * 9), simulated.add([2] * 9)
    for _ in range(9):
        simulated.step()
    assert second.swapped and second.computed and simulated.host and simulated.host.used
    simulated.scheduler.remove(first)
    simulated.step()
    assert second in simulated.scheduler.running and simulated.host.used == 0 and second.preempted == 1


def test_digests_depend_on_all_tokens_before():
    a, b = digests([1, 2, 3, 4, 5, 6, 7, 8, 9], 4), digests([0, 2, 3, 4, 5, 6, 7, 8], 4)
    assert len(a) == len(b) == 2 and a[1] != b[1]
    assert digests([5, 6, 7, 8], 4, a[0])[0] == a[1] and digests([1, 2, 3, 4], 4, b"adapter") != a[:1]


def test_misuse_is_refused():
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0, 4)
    pool.allocate(), pool.allocate()
    with pytest.raises(IndexError, match="held"):
        pool.allocate()


def test_a_user_who_was_away_begins_where_the_others_are():
    """Time away earns no credit: the one who comes back is not served alone until it has caught up."""
    simulated = Simulated(blocks=64, budget=2, most=1)
    simulated.add([1] * 40, user="busy")
    for _ in range(10):
        simulated.step()
    served = simulated.scheduler.served
    busy = served["", "busy"]
    assert busy == 20
    simulated.add([2] * 40, user="late")
    assert served["", "late"] == busy, "the new user has the tokens of the one who waits least"
    served["", "late"] += 10
    simulated.add([3] * 40, user="later")
    assert served["", "later"] == busy, "of several, it begins at the least"
    simulated.add([4] * 4, user="busy")
    assert served["", "busy"] == busy, "an active user keeps its count"


def test_accounts_are_equals_of_accounts_and_users_of_users_of_one_account():
    simulated = Simulated(blocks=64, budget=2, most=1)
    simulated.add([1] * 40, account="a", user="x")
    for _ in range(5):
        simulated.step()
    simulated.add([2] * 40, account="b", user="y")
    served = simulated.scheduler.served
    assert served["a",] == served["b",] == 10, "a new account begins where the others are"
    assert served["b", "y"] == 0, "its user has no equals in that account"
