"""Rules about lines: those that break one are cut out; a document of which too little is left is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus import native
from tutti.data.corpus.documents import Outcome, integers, pc, replace, texts
from tutti.data.corpus.steps.step import Step

PHRASES = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
           "use cookies")  # fmt: skip
_BROKEN = ("", "no_terminal_punctuation", "too_few_words", "long_word", "phrase")  # LineRule of lines.cpp


@dataclass(frozen=True)
class Lines(Step):
    """Filter lines by the rules of C4 (Raffel et al. 2020, section 2.2, https://arxiv.org/abs/1910.10683).

    punctuation: cut lines that do not end in a terminal punctuation mark or end in an ellipsis (FineWeb does without).
    words: cut lines of fewer words. longest_word: cut lines with a longer word, in code points; 0: none.
    phrases: cut lines that contain one, in lower-case ASCII.
    sentences: drop documents of which fewer sentences are left.
    curly: drop documents with a curly bracket. lorem: drop documents with "lorem ipsum".
    citations: remove the marks [1], [edit] and [citation needed].
    """

    kind: ClassVar[str] = "lines"
    punctuation: bool = True
    words: int = 3
    longest_word: int = 1000
    phrases: tuple[str, ...] = PHRASES
    sentences: int = 5
    curly: bool = True
    lorem: bool = True
    citations: bool = True

    def __post_init__(self):
        for phrase in self.phrases:
            if not phrase or not phrase.isascii() or phrase != phrase.lower():
                raise ValueError(f"lines: the phrase {phrase!r} must be lower-case ASCII, and not empty")

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        documents = texts(batch)
        reasons: list[str | None] = [None] * len(batch)
        for wanted, needle, reason in ((self.lorem, "lorem ipsum", "lorem_ipsum"), (self.curly, "{", "curly_bracket")):
            if wanted:
                contains = pc.match_substring(documents, needle, ignore_case=needle.isalpha() or " " in needle)
                for i in np.flatnonzero(contains.to_numpy(zero_copy_only=False)):
                    reasons[i] = reasons[i] or reason
        cut: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if self.citations:
            documents, cut["citation_mark"] = _without_citations(documents)
        documents, lines, left = self._filtered(documents)
        for i, count in enumerate(left):
            if reasons[i] is None and count < self.sentences:
                reasons[i] = "too_few_sentences"
        return Outcome(replace(batch, "text", documents), reasons, None, cut | lines)

    def _filtered(self, documents: pa.StringArray) -> tuple[pa.StringArray, dict[str, Any], np.ndarray]:
        n, offsets, data = native.text_arguments(documents)
        out = np.empty(int(offsets[-1] - offsets[0]) + 1, np.uint8)
        out_offsets = np.empty(n + 1, np.int32)
        lines, size = np.zeros((n, len(_BROKEN)), np.int64), np.zeros((n, len(_BROKEN)), np.int64)
        left = np.zeros(n, np.int64)
        phrases = b"".join(p.encode() + b"\0" for p in self.phrases)
        native.call("filter_lines", n, offsets, data, self.words, self.longest_word, self.punctuation, phrases,
                    len(self.phrases), out, out_offsets, lines, size, left)  # fmt: skip
        cut = {name: (lines[:, k], size[:, k]) for k, name in enumerate(_BROKEN) if k}
        return native.text_array(out_offsets, out), cut, left


_CITATION = r"\[(\d{1,3}|edit|citation needed)\]"


def _without_citations(documents: pa.StringArray) -> tuple[pa.StringArray, tuple[np.ndarray, np.ndarray]]:
    marks = integers(pc.count_substring_regex(documents, _CITATION))
    shorter = pc.replace_substring_regex(documents, _CITATION, "")
    return shorter, (marks, integers(pc.binary_length(documents)) - integers(pc.binary_length(shorter)))
