"""Tables of code points for the C++ functions, from Python's own Unicode database."""

from __future__ import annotations

import sys
import unicodedata
from functools import cache

import numpy as np

SPACE, ALPHA, DIGIT, PUNCTUATION, IDEOGRAPH, UPPER = (1 << k for k in range(6))
SIZE = 0x20000
"""Code points from here on are ideographs of the supplementary planes, tags and private use."""

# Scripts that are written without spaces between words.
_WITHOUT_SPACES = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x31F0, 0x31FF),
                   (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF))  # fmt: skip


@cache
def code_points() -> tuple[np.ndarray, np.ndarray]:
    """The classes of code points, (SIZE,) uint8, and their lower case, (SIZE,) uint32."""
    classes, lower = np.zeros(SIZE, np.uint8), np.arange(SIZE, dtype=np.uint32)
    for point in range(SIZE):
        letter = chr(point)
        kind = unicodedata.category(letter)
        if letter.isspace():
            classes[point] = SPACE
        elif kind[0] == "L":
            classes[point] = ALPHA | (UPPER if kind in ("Lu", "Lt") else 0)
        elif kind[0] == "N":
            classes[point] = DIGIT
        elif kind[0] != "M":  # punctuation, symbols, control characters
            classes[point] = PUNCTUATION
        small = letter.lower()
        if len(small) == 1:
            lower[point] = ord(small)
    for first, last in _WITHOUT_SPACES:
        part = classes[first : last + 1]
        part[(part & ALPHA) > 0] |= IDEOGRAPH
    return classes, lower


def version() -> str:
    """The Unicode version of the tables, which differs between versions of Python."""
    return f"unicode {unicodedata.unidata_version} python {sys.version_info[0]}.{sys.version_info[1]}"
