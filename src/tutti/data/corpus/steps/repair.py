"""Repair of encodings, and one form of Unicode."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import Outcome, pc, replace, texts
from tutti.data.corpus.steps.step import Step, needs

# Encodings that UTF-8 is mistaken for: those that ftfy knows.
_MISTAKEN = ("latin-1", "windows-1252", "windows-1251", "windows-1250", "windows-1253", "windows-1254", "windows-1257",
             "iso-8859-2", "macroman", "cp437")  # fmt: skip
_BEFORE_SPACE = (0xC2, 0xC3, 0xC5, 0xCE, 0xD0, 0xD9)


@cache
def _suspicious() -> str:
    """A regular expression that matches whatever ftfy might change besides curly quotes and ligatures.

    It has the first two bytes of UTF-8 sequences, decoded with each encoding; control and zero-width characters, line
    breaks of other systems, fullwidth and halfwidth forms, and HTML entities.
    """
    pairs: list[str] = []
    for encoding in _MISTAKEN:
        first, more = _characters(range(0xC2, 0xF5), encoding), _characters(range(0x80, 0xC0), encoding)
        spaced = _characters(_BEFORE_SPACE, encoding)  # a no-break space, the byte A0, may have become a space
        pairs += [f"{first}{more}", f"{spaced} ", f"{first} {more}"]
    others = (
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\x{ad}\x{200b}-\x{200d}\x{2028}\x{2029}\x{2060}\x{206a}-\x{206f}\x{feff}"
        r"\x{fff9}-\x{fffd}\x{3000}\x{ff01}-\x{ffef}]|&[A-Za-z#][A-Za-z0-9]{1,30};"
    )
    return "|".join([*pairs, others])


def _characters(codes: Iterable[int], encoding: str) -> str:
    """A class of the characters that bytes have in an encoding, or that Latin-1 gives them where it has none."""
    points = {ord(bytes([c]).decode(encoding, "ignore") or chr(c)) for c in codes}
    return "[" + "".join(f"\\x{{{point:x}}}" for point in sorted(points)) + "]"


@dataclass(frozen=True)
class Repair(Step):
    """Repair text that was decoded with the wrong encoding (ftfy), and bring it into one form of Unicode.

    mojibake: repair with `ftfy` (Speer 2019) what it recognizes, remove control and zero-width characters, and decode
        HTML entities. Documents without a suspicious character are not looked at.
    form: NFC, NFKC, NFD, NFKD, or "" to leave the form.
    quotes: make quotes straight.
    """

    kind: ClassVar[str] = "repair"
    packages: ClassVar[tuple[str, ...]] = ("ftfy",)
    mojibake: bool = True
    form: str = "NFC"
    quotes: bool = False

    def __post_init__(self):
        if self.form not in ("NFC", "NFKC", "NFD", "NFKD", ""):
            raise ValueError(f"repair: form is {self.form!r}; give NFC, NFKC, NFD, NFKD or an empty string")
        if self.mojibake:
            needs("ftfy")

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        documents = texts(batch)
        if self.mojibake:
            documents = self._repaired(documents)
        if self.form:
            documents = pc.utf8_normalize(documents, self.form)
        return Outcome(replace(batch, "text", documents))

    def _repaired(self, documents: pa.StringArray) -> pa.StringArray:
        pattern = _suspicious() + ("|[\u2018-\u201f]" if self.quotes else "")
        suspicious = pc.match_substring_regex(documents, pattern).to_numpy(zero_copy_only=False)
        if not suspicious.any():
            return documents
        import ftfy

        config = ftfy.TextFixerConfig(
            unescape_html=True, uncurl_quotes=self.quotes, normalization=None, explain=False, fix_latin_ligatures=False
        )
        values = documents.to_pylist()
        for i in np.flatnonzero(suspicious):
            values[i] = _without_invisible(ftfy.fix_text(values[i], config))
        return pa.array(values, pa.string())


_INVISIBLE = dict.fromkeys([0x200B, 0x2060, 0xFEFF, 0xAD])
# Joiners spell words in some scripts and pictures in emojis, but nothing beside letters of Latin.
_JOINERS = re.compile("(?<=[\0-\u024f])[\u200c\u200d]+|[\u200c\u200d]+(?=[\0-\u024f])")


def _without_invisible(text: str) -> str:
    return _JOINERS.sub("", text.translate(_INVISIBLE))
