"""A small artificial language of reviews, with known labels, for tests of few-shot and multi-task learning.

A review is one to three clauses about things of one topic, all praise or all blame. Praise and blame are told by
adjectives of which there are many, so that a few labelled reviews show few of them, and by negation. In text to learn
the language from, a verdict follows one of the clauses, as it may on the web: what masked language modelling learns
from them, a cloze question can ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SYLLABLES = [
    "ba",
    "do",
    "fi",
    "gu",
    "ke",
    "la",
    "mo",
    "ni",
    "pu",
    "ra",
    "so",
    "ti",
    "vu",
    "we",
    "ze",
    "cho",
    "she",
    "thu",
]
CLAUSES = ["the {n} was {a}", "i found the {n} {a}", "its {n} is really {a}", "we think the {n} {a}", "a {n} , {a}"]
VERDICTS = [["bad", "awful", "poor"], ["good", "great", "fine"]]
ASIDES = ["{c} : {v} !", "{c} , {v} !"]


@dataclass(frozen=True)
class Reviews:
    """The language of the reviews.

    adjectives: number for praise, and for blame. topics, nouns: number of topics, and of nouns of each.
    negated: fraction of clauses with "not".

    seed: random seed of the words of the language; the reviews have seeds of their own.
    """

    adjectives: int = 60
    topics: int = 6
    nouns: int = 8
    negated: float = 0.1
    seed: int = 0
    words: list[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        words: dict[str, None] = {}
        while len(words) < 2 * self.adjectives + self.topics * self.nouns:
            words["".join(draw.choice(SYLLABLES, draw.integers(2, 4)))] = None
        object.__setattr__(self, "words", list(words))

    def adjective(self, praise: int, number: int) -> str:
        return self.words[praise * self.adjectives + number]

    def noun(self, topic: int, number: int) -> str:
        return self.words[2 * self.adjectives + topic * self.nouns + number]

    def rows(self, count: int, seed: int, verdicts: float = 0.0) -> list[dict[str, str | int]]:
        """Reviews: `text`, `label` (1 praise, 0 blame) and `topic`. verdicts: fraction with one."""
        draw = np.random.default_rng([self.seed, seed])
        return [self._row(draw, verdicts) for _ in range(count)]

    def _row(self, draw: np.random.Generator, verdicts: float) -> dict[str, str | int]:
        label, topic = int(draw.integers(2)), int(draw.integers(self.topics))
        clauses = []
        for _ in range(draw.integers(1, 4)):
            negated = draw.random() < self.negated
            adjective = self.adjective(label ^ int(negated), int(draw.integers(self.adjectives)))
            clause = CLAUSES[draw.integers(len(CLAUSES))]
            noun = self.noun(topic, int(draw.integers(self.nouns)))
            clauses.append(clause.format(n=noun, a=f"not {adjective}" if negated else adjective))
        if draw.random() < verdicts:
            at, aside, words = draw.integers(len(clauses)), ASIDES[draw.integers(len(ASIDES))], VERDICTS[label]
            clauses[at] = aside.format(c=clauses[at], v=words[draw.integers(len(words))])
        return {"text": " and ".join(clauses), "label": label, "topic": topic}
