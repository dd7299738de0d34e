"""The examples in docstrings are true."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ("rows", "buckets", "packs", "mixture", "stream"))
def test_examples(name):
    results = doctest.testmod(import_module(f"tutti.data.{name}"))
    assert results.attempted and not results.failed
