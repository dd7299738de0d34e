"""Find texts of a kind and put a mask in their place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import pc


@dataclass(frozen=True)
class Kind:
    """What is masked as `mask`: what `pattern` matches and `valid` accepts. likely: an RE2 pattern of all documents
    that may have one; the others are not looked at."""

    mask: str
    likely: str
    pattern: re.Pattern[str]
    valid: Callable[[str], bool]


def masked(documents: pa.StringArray, kind: Kind) -> tuple[pa.StringArray, np.ndarray, np.ndarray]:
    """The documents with masks, how many each has, and how many bytes shorter it became, (n,) int64."""
    counts, sizes = np.zeros(len(documents), np.int64), np.zeros(len(documents), np.int64)
    likely = np.flatnonzero(pc.match_substring_regex(documents, kind.likely).to_numpy(zero_copy_only=False))
    changed: dict[int, str] = {}
    for i in likely:
        text = documents[int(i)].as_py()

        def mask(match: re.Match[str], at: int = int(i)) -> str:
            if not kind.valid(match.group()):
                return match.group()
            counts[at] += 1
            sizes[at] += len(match.group().encode()) - len(kind.mask)
            return kind.mask

        new = kind.pattern.sub(mask, text)
        if counts[i]:
            changed[int(i)] = new
    if not changed:
        return documents, counts, sizes
    values = documents.to_pylist()
    for i, text in changed.items():
        values[i] = text
    return pa.array(values, pa.string()), counts, sizes
