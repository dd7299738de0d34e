"""Nothing looks for garbage while a graph is made, and all is as it was afterwards."""

import gc

import pytest

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
