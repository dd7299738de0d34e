"""Nothing looks for garbage while a graph is made, and all is as it was afterwards."""

import gc
import weakref

import pytest

from tutti.ir import garbage
from tutti.ir.garbage import uncollected


def test_the_collector_stands_by_and_comes_back():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError), uncollected():
        raise ValueError
    assert gc.isenabled()


def test_it_is_left_off_where_it_was():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


@pytest.fixture
def thawed():
    """Undo the freeze of tests/conftest.py for a test."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_young_collections_do_not_look_at_what_was_built(thawed):
    with uncollected():
        built = [Node() for _ in range(100)]
    young = {id(x) for generation in (0, 1) for x in gc.get_objects(generation)}
    assert not young & {id(node) for node in built}


def test_garbage_is_collected_once_there_is_much(thawed, monkeypatch):
    with uncollected():
        left = cycle()
    assert left() is not None
    monkeypatch.setattr(garbage, "MAX_NEW_BLOCKS", -1)
    with uncollected():
        pass
    assert left() is None


def test_objects_that_are_frozen_stay_so():
    tracked = [[]]
    assert any(x is tracked for x in gc.get_objects())
    gc.freeze()
    try:
        with uncollected():
            pass
        assert gc.get_freeze_count() > 0
        assert not any(x is tracked for x in gc.get_objects())  # frozen objects are not listed
    finally:
        gc.unfreeze()
