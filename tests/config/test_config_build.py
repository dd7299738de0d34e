"""Dataclasses from tables of config files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from tutti.config.build import build, check_table, keys


@dataclass(frozen=True)
class Inner:
    size: int
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rate: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)
    more: tuple[Inner, ...] = ()
    last: Inner | None = None

    def check(self) -> None:
        if self.rate > 1:
            raise ValueError("rate is above 1")


def test_sections_are_built_and_lists_of_them():
    table = {"inner": {"size": 1}, "options": {"x": [1, "y"]}, "more": [{"size": 2}], "last": {"size": 3, "kind": "b"}}
    config = build(Outer, table, "f")
    assert config == Outer(Inner(1), options={"x": [1, "y"]}, more=(Inner(2),), last=Inner(3, "b"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r"f: the file needs \[inner\] size"),
        ({"inner": {}}, r"f: \[inner\] needs size"),
        ({"inner": {"size": "1"}}, r"f: inner.size = '1' should be a whole number"),
        ({"inner": {"size": 1, "knd": "b"}}, r"f: there is no key inner.knd; did you mean inner.kind\?"),
        ({"inner": {"size": 1}, "more": {"size": 2}}, r"more is a list of sections: write \[\[more\]\]"),
        ({"inner": {"size": 1}, "rate": 2}, "f: rate is above 1"),
    ],
)
def test_mistakes_are_named(table, message):
    with pytest.raises(ValueError, match=message):
        check_table(Outer, table, "f")


def test_the_keys_are_listed_with_types_and_defaults():
    lines = [" ".join(line.split()) for line in keys(Outer)]
    assert lines[:3] == ["inner.size a whole number", "inner.kind one of 'a', 'b'; 'a' without it",
                         "rate a number; 0.5 without it"]  # fmt: skip
