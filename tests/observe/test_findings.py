"""What is slow is named, and nothing else, in recordings whose truth is known."""

import random

import pytest

from recorded import write
from tutti.observe.findings import slow_links, slow_ranks
from tutti.observe.recording import read

SEEDS = range(10)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_slow(tmp_path, seed):
    write(tmp_path, random.Random(seed).choice([2, 3, 8, 32]), seed=seed, busy=0.3)
    recording = read(tmp_path)
    assert not slow_ranks(recording) and not slow_links(recording)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_rank(tmp_path, seed):
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 8, 32])
    rank, kind, times = chance.randrange(ranks), chance.choice(["matmuls", "rest"]), chance.uniform(1.4, 3)
    write(tmp_path, ranks, seed=seed, slower={(rank, kind): times}, busy=0.2)
    (slow,) = slow_ranks(read(tmp_path))
    assert (slow.rank, slow.kind) == (rank, kind)
    assert slow.speed == pytest.approx(1 / times, rel=0.1)
    assert str(slow).startswith(f"rank {rank}'s {'matmuls' if kind == 'matmuls' else 'other operators'} run at ")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_link(tmp_path, seed):
    chance = random.Random(seed)
    ranks = chance.choice([3, 8, 32])
    source = chance.randrange(ranks)
    target, times = (source + chance.choice([1, 2, -1])) % ranks, chance.uniform(2.5, 5)
    write(tmp_path, ranks, seed=seed, links={(source, target): times})
    recording = read(tmp_path)
    (slow,) = slow_links(recording)
    assert (slow.source, slow.target) == (source, target) and not slow_ranks(recording)
    assert slow.speed == pytest.approx(1 / times, rel=0.2)
    assert slow.bandwidth == pytest.approx(2**20 / (1e-3 * times), rel=0.3)


def test_links_between_machines_are_compared_with_their_like(tmp_path):
    between = {(i, j): 10.0 for i in range(8) for j in range(8) if i % 2 != j % 2}
    write(tmp_path, 8, links=between, ahead={"one": 0, "two": 0})
    assert not slow_links(read(tmp_path))
    write(tmp_path, 8, links={**between, (0, 1): 30.0}, ahead={"one": 0, "two": 0})
    assert [(slow.source, slow.target) for slow in slow_links(read(tmp_path))] == [(0, 1)]


def test_ranks_that_compute_something_else_are_not_compared(tmp_path):
    write(tmp_path, 2, slower={(1, "matmuls"): 3.0})
    path = tmp_path / "rank-1.jsonl"
    path.write_text(path.read_text().replace("layers.*", "head"))
    assert not slow_ranks(read(tmp_path))
