"""The pool of blocks: who may write into a block, what is found, what is reused first."""

from __future__ import annotations

import pytest

from tutti.serve.blocks import Blocks, digests


def test_a_block_is_its_holders_own_while_nobody_else_holds_or_finds_it():
    pool = Blocks(4, 2)
    block = pool.take()
    assert pool.is_own(block)
    pool.hold(block)
    assert not pool.is_own(block), "two sequences hold it"
    pool.release([block])
    assert pool.is_own(block)
    pool.know(block, b"digest")
    assert not pool.is_own(block), "a later sequence may find it"
    pool.forget_all()
    assert pool.is_own(block)
    pool.release([block])
    assert not pool.is_own(block), "nobody holds it"


def test_a_known_block_is_found_until_it_is_taken_again():
    pool = Blocks(2, 2)
    first, second = pool.take(), pool.take()
    names = digests([1, 2, 3, 4, 5], 2)
    pool.know(first, names[0])
    pool.know(second, names[1])
    assert pool.find(names) == [first, second] and pool.find([names[1]]) == [second]
    assert pool.find(digests([1, 2, 9, 9], 2)) == [first] and pool.find(digests([9, 2], 2)) == []
    pool.release([first, second])
    assert pool.free == 2 and pool.find(names) == [first, second], "free blocks keep their contents"
    assert pool.take() == second, "the end of a sequence is reused before its beginning"
    assert pool.find(names) == [first]


def test_a_block_without_contents_is_reused_before_one_with_a_known_beginning():
    pool = Blocks(3, 2)
    known, blank = pool.take(), pool.take()
    pool.know(known, b"digest")
    pool.release([known])
    pool.release([blank])
    assert pool.take() == blank


def test_blocks_are_counted():
    pool = Blocks(2, 2)
    with pytest.raises(ValueError, match="released more often than it was taken"):
        pool.release([0])
    pool.take(), pool.take()
    assert pool.used == 2 and pool.needed(3) == 2 and pool.needed(4) == 2
    with pytest.raises(IndexError, match="all blocks of the KV cache are held"):
        pool.take()
