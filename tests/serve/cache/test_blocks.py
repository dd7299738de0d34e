"""The pool of blocks: who may write into a block, what is found, what is reused first."""

from __future__ import annotations

import pytest

from tutti.serve.cache.blocks import BlockPool, digests


def test_a_block_is_its_holders_own_while_nobody_else_holds_or_finds_it():
    pool = BlockPool(4, 2)
    block = pool.allocate()
    assert pool.is_own(block)
    pool.acquire(block)
    assert not pool.is_own(block), "two sequences hold it"
    pool.release([block])
    assert pool.is_own(block)
    pool.register(block, b"digest")
    assert not pool.is_own(block), "a later sequence may find it"
    pool.forget_all()
    assert pool.is_own(block)
    pool.release([block])
    assert not pool.is_own(block), "nobody holds it"


def test_a_known_block_is_found_until_it_is_taken_again():
    pool = BlockPool(2, 2)
    first, second = pool.allocate(), pool.allocate()
    names = digests([1, 2, 3, 4, 5], 2)
    pool.register(first, names[0])
    pool.register(second, names[1])
    assert pool.find(names) == [first, second] and pool.find([names[1]]) == [second]
    assert pool.find(digests([1, 2, 9, 9], 2)) == [first] and pool.find(digests([9, 2], 2)) == []
    pool.release([first, second])
    assert pool.free == 2 and pool.find(names) == [first, second], "free blocks keep their contents"
    assert pool.allocate() == second, "the end of a sequence is reused before its beginning"
    assert pool.find(names) == [first]


def test_a_block_without_contents_is_reused_before_one_with_a_known_beginning():
    pool = BlockPool(3, 2)
    registered, blank = pool.allocate(), pool.allocate()
    pool.register(registered, b"digest")
    pool.release([registered])
    pool.release([blank])
    assert pool.allocate() == blank


def test_blocks_are_counted():
    pool = BlockPool(2, 2)
    with pytest.raises(ValueError, match="released more often than it was taken"):
        pool.release([0])
    pool.allocate(), pool.allocate()
    assert pool.used == 2 and pool.needed(3) == 2 and pool.needed(4) == 2
    with pytest.raises(IndexError, match="all blocks of the KV cache are held"):
        pool.allocate()
