"""The cases of a test, and which of them are slow: `make proofs` runs those, `make test` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def slow(*values: Any, **options: Any):
    """A case that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def some(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All of `cases`; those not in `quick` are slow. A case that is a tuple counts as several arguments."""
    cases = list(cases)
    assert all(case in cases for case in quick), "a quick case is none of the cases"
    return [case if case in quick else slow(*case) if isinstance(case, tuple) else slow(case) for case in cases]


def most(cases: Iterable[Any], long: Collection[Any]) -> list[Any]:
    """All of `cases`; those in `long` are slow."""
    cases = list(cases)
    assert all(case in cases for case in long), "a slow case is none of the cases"
    return some(cases, [case for case in cases if case not in long])


def crossed(*factors: Iterable[Any], quick: Collection[tuple] | None = None) -> list[Any]:
    """All combinations of the factors' values; a value that is a tuple counts as several arguments.

    Without `quick`, as many are quick as the longest factor has values: together they have each value of each factor.
    """
    values = [[value if isinstance(value, tuple) else (value,) for value in factor] for factor in factors]
    if quick is None:
        longest = max(map(len, values))
        quick = [sum((factor[i % len(factor)] for factor in values), ()) for i in range(longest)]
    return some((sum(case, ()) for case in product(*values)), quick)
