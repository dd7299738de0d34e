"""Rules about whole documents: published thresholds on features of their text, as tables in TOML.

A table has a `[source]` and a list of `[[rule]]`: a name, a feature (features.cpp), and `min`, `max` or both. A
document is dropped with the name of the first rule that it breaks.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus import native
from tutti.data.corpus.documents import Outcome, texts
from tutti.data.corpus.files import digest
from tutti.data.corpus.steps.step import Step

FOLDER = Path(__file__).parents[1] / "tables"

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""The words that a document needs two of (Rae et al. 2021, appendix A1.1)."""


@dataclass(frozen=True)
class Rule:
    """`feature` must be in [min, max]."""

    name: str
    feature: str
    min: float = -np.inf
    max: float = np.inf

    def __post_init__(self):
        for bound in (self.min, self.max):
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise ValueError(f"rule {self.name}: {bound!r} is not a number")
        if self.min == -np.inf and self.max == np.inf:
            raise ValueError(f"rule {self.name} has neither min nor max")


@dataclass(frozen=True)
class Rules(Step):
    """Drop documents by published rules.

    tables: names of tables that come with Tutti (gopher_quality, gopher_repetition, fineweb, code), or paths of your
    own. stop_words: what the feature `stop_words` counts; give those of your language.
    """

    kind: ClassVar[str] = "rules"
    tables: tuple[str, ...] = ("gopher_repetition", "gopher_quality", "fineweb")
    stop_words: tuple[str, ...] = STOP_WORDS

    def __post_init__(self):
        for table in self.tables:
            read_table(table)

    @property
    def rules(self) -> list[Rule]:
        return [rule for table in self.tables for rule in read_table(table)]

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        values = features(texts(batch), self.stop_words)
        reasons: list[str | None] = [None] * len(batch)
        details: list[str | None] = [None] * len(batch)
        undecided = np.ones(len(batch), bool)
        for rule in self.rules:
            value = values[:, FEATURES.index(rule.feature)]
            broken = undecided & ((value < rule.min) | (value > rule.max))
            for i in np.flatnonzero(broken):
                reasons[i], details[i] = rule.name, f"{rule.feature} is {value[i]:.4g}"
            undecided &= ~broken
        return Outcome(batch, reasons, details)

    def key(self) -> dict[str, Any]:
        digests = [digest(path_of(x)) for x in self.tables]
        return {**super().key(), "digests": digests}


def features(documents: pa.StringArray, stop_words: tuple[str, ...] = STOP_WORDS) -> np.ndarray:
    """The features of documents, (n, len(FEATURES)) float64."""
    n, offsets, data = native.text_arguments(documents)
    stops = word_hashes(stop_words)
    out = np.empty((n, len(FEATURES)))
    native.call("features", n, offsets, data, stops, len(stops), out)
    return out


@cache
def word_hashes(words: tuple[str, ...]) -> np.ndarray:
    """The sorted hashes of single words, uint64."""
    n, offsets, data = native.text_arguments(pa.array(words, pa.string()))
    out = np.zeros(n, np.uint64)
    native.call("word_hashes", n, offsets, data, out)
    return np.unique(out)


def path_of(table: str) -> Path:
    """The file of a table. Raises ValueError if there is none."""
    path = FOLDER / f"{table}.toml"
    if not path.exists():
        path = Path(table).expanduser()
    if not path.is_file():
        tables = ", ".join(sorted(p.stem for p in FOLDER.glob("*.toml")))
        raise ValueError(f"there is no table of rules {table}; give one of {tables}, or the path of a TOML file")
    return path


@cache
def read_table(table: str) -> tuple[Rule, ...]:
    """The rules of a table. Raises ValueError for one that names no feature."""
    path = path_of(table)
    try:
        rows = tomllib.loads(path.read_text("utf-8")).get("rule", ())
        wrong = [key for row in rows for key in row if key not in ("name", "feature", "min", "max")]
        if wrong or not all("name" in row and "feature" in row for row in rows):
            raise ValueError(f"there is no key {wrong[0]}" if wrong else "a rule has no name or no feature")
        rules = tuple(Rule(**row) for row in rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; a [[rule]] has name, feature, and min, max or both") from None
    for rule in rules:
        if rule.feature not in FEATURES:
            raise ValueError(f"{path}: rule {rule.name}: no feature {rule.feature}; there are {', '.join(FEATURES)}")
    if not rules:
        raise ValueError(f"{path} has no [[rule]]")
    return rules


FEATURES = (
    "characters", "bytes", "words", "mean_word_length", "hashes_per_word", "ellipses_per_word", "alphabetic_words",
    "stop_words", "lines", "bullet_lines", "ellipsis_lines", "punctuated_lines", "short_lines", "mean_line_length",
    "max_line_length", "newlines_per_word", "duplicate_lines", "duplicate_line_characters", "paragraphs",
    "duplicate_paragraphs", "duplicate_paragraph_characters", "top_2_gram", "top_3_gram", "top_4_gram",
    "duplicate_5_grams", "duplicate_6_grams", "duplicate_7_grams", "duplicate_8_grams", "duplicate_9_grams",
    "duplicate_10_grams", "letters", "digits", "uppercase_letters", "alphanumeric", "curly_brackets",
)  # fmt: skip
"""The columns of `features`, in the order of features.cpp (a test compares them)."""
