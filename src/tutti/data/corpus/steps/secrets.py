"""Keys, tokens and passwords in source code and pages: formats that their issuers publish, and assignments of random
text."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import Outcome, replace, texts
from tutti.data.corpus.steps.mask import Kind, masked
from tutti.data.corpus.steps.step import Step

_PUBLISHED = {
    "Amazon": r"(?:AKIA|ASIA)[A-Z2-7]{16}",
    "Anthropic": r"sk-ant-[A-Za-z0-9_-]{20,}",
    "GitHub": r"(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60,90})",
    "GitLab": r"glpat-[A-Za-z0-9_-]{20,}",
    "Google": r"AIza[A-Za-z0-9_-]{35}",
    "Hugging Face": r"hf_[A-Za-z]{34}",
    "npm": r"npm_[A-Za-z0-9]{36}",
    "OpenAI": r"sk-(?:proj-|svcacct-)?[A-Za-z0-9_-]{32,}",
    "PyPI": r"pypi-[A-Za-z0-9_-]{50,}",
    "SendGrid": r"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}",
    "Slack": r"xox[abprs]-[A-Za-z0-9-]{10,}",
    "Stripe": r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "Twilio": r"SK[0-9a-f]{32}",
    "JSON Web Token": r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
}
_PRIVATE = r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"
_NAME = r"(?:api[_-]?key|secret|token|passw(?:or)?d|access[_-]?key|auth[_-]?key|client[_-]?secret|private[_-]?key)"


def _always(text: str) -> bool:
    return True


def _is_random(text: str) -> bool:
    """Whether the quoted value of an assignment has more than 3.5 bits of entropy a character, and digits and
    letters."""
    value = re.split(r"[\"']", text)[-2] if re.search(r"[\"']", text) else text
    if len(value) < 16 or not re.search(r"\d", value) or not re.search(r"[A-Za-z]", value):
        return False
    counts = Counter(value).values()
    return -sum(c / len(value) * math.log2(c / len(value)) for c in counts) > 3.5


KEYS: tuple[Kind, ...] = (
    Kind(
        "<KEY>", "-----BEGIN [A-Z ]*PRIVATE KEY",
        re.compile(
            _PRIVATE + r"(?:(?!-----BEGIN).){0,20000}?(?:-----END (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----|\Z)",
            re.DOTALL,
        ),
        _always,
    ),
    Kind(
        "<KEY>", "|".join(_PUBLISHED.values()),
        re.compile(rf"(?<![A-Za-z0-9_-])(?:{'|'.join(_PUBLISHED.values())})(?![A-Za-z0-9_-])"), _always,
    ),
    Kind(
        "<KEY>", rf"(?i){_NAME}\w{{0,20}}[\"']?\s{{0,3}}(?:[:=]|=>)\s{{0,3}}[\"']",
        re.compile(
            rf"(?<![A-Za-z]){_NAME}\w{{0,20}}[\"']?\s{{0,3}}(?:[:=]|=>)\s{{0,3}}[\"'][A-Za-z0-9_\-+/=.]{{16,200}}[\"']",
            re.IGNORECASE,
        ),
        _is_random,
    ),
)  # fmt: skip
"""Kinds of keys, in the order in which they are looked for."""


@dataclass(frozen=True)
class Secrets(Step):
    """Drop documents with keys, tokens or passwords; or mask them as `<KEY>`.

    action: "drop" or "mask".
    """

    kind: ClassVar[str] = "secrets"
    action: str = "drop"

    def __post_init__(self):
        if self.action not in ("drop", "mask"):
            raise ValueError(f"secrets: action is {self.action!r}; give drop or mask")

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        documents = texts(batch)
        counts, sizes = np.zeros(len(batch), np.int64), np.zeros(len(batch), np.int64)
        for kind in KEYS:
            documents, masks, size = masked(documents, kind)
            counts, sizes = counts + masks, sizes + size
        if self.action == "mask":
            return Outcome(replace(batch, "text", documents), None, None, {"key": (counts, sizes)})
        return Outcome(batch, ["secret" if c else None for c in counts], [f"{c} keys" if c else None for c in counts])
