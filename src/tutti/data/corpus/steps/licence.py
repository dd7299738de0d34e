"""Licences of source code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from tutti.data.corpus.documents import Outcome, replace, texts
from tutti.data.corpus.steps.step import Step

PERMISSIVE = ("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "MIT", "PSF-2.0",
              "Unlicense", "Zlib")  # fmt: skip
"""Licences that allow use without conditions beyond attribution, by their SPDX names."""

# Sentences that a licence has and no other: in lower case, white space is one space. The first that occurs decides.
_SENTENCES = (
    ("GNU AFFERO GENERAL PUBLIC LICENSE", "AGPL-3.0"),
    ("GNU LESSER GENERAL PUBLIC LICENSE", "LGPL"),
    ("GNU LIBRARY GENERAL PUBLIC LICENSE", "LGPL"),
    ("GNU GENERAL PUBLIC LICENSE", "GPL"),
    ("Mozilla Public License", "MPL"),
    ("Eclipse Public License", "EPL"),
    ("Apache License, Version 2.0", "Apache-2.0"),
    ("Apache License Version 2.0", "Apache-2.0"),
    ("Boost Software License", "BSL-1.0"),
    ("Python Software Foundation License", "PSF-2.0"),
    ("Permission is hereby granted, free of charge, to any person obtaining a copy", "MIT"),
    ("Permission to use, copy, modify, and/or distribute this software for any purpose", "ISC"),
    ("Permission to use, copy, modify, and distribute this software for any purpose", "ISC"),
    ("Neither the name of", "BSD-3-Clause"),
    ("may be used to endorse or promote products derived from", "BSD-3-Clause"),
    ("Redistribution and use in source and binary forms", "BSD-2-Clause"),
    ("This is free and unencumbered software released into the public domain", "Unlicense"),
    ("CC0 1.0 Universal", "CC0-1.0"),
    ("This software is provided 'as-is', without any express or implied warranty", "Zlib"),
    ("All rights reserved", "proprietary"),
)
_SPDX = re.compile(r"SPDX-License-Identifier:\s*([^\n*#/]+)")
_HEAD = 4000  # characters that may state a licence


@dataclass(frozen=True)
class Licence(Step):
    """Write the column `licence` (an SPDX name) from the head of each file, and drop files whose licence is not
    allowed.

    An SPDX identifier decides; an expression with OR is allowed if one of its licences is, with AND if all are.
    Otherwise sentences decide that only one licence has.

    allow: SPDX names. unknown: whether files that state no licence are kept (their repository may state one).
    """

    kind: ClassVar[str] = "licence"
    allow: tuple[str, ...] = PERMISSIVE
    unknown: bool = True

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        names = [licence_of(text) for text in texts(batch).to_pylist()]
        reasons = [
            None if (self.unknown if name is None else allowed(name, self.allow)) else
            ("licence_unknown" if name is None else "licence_not_allowed")
            for name in names
        ]  # fmt: skip
        return Outcome(replace(batch, "licence", pa.array(names, pa.string())), reasons, names)


def licence_of(text: str) -> str | None:
    """The SPDX expression that the head of a file states, or the name of a licence that its words are of."""
    head = text[:_HEAD]
    if match := _SPDX.search(head):
        return match.group(1).strip().removesuffix("-->").strip()
    plain = _folded(head)
    return next((name for sentence, name in _SENTENCES if _folded(sentence) in plain), None)


def _folded(text: str) -> str:
    """In lower case, without signs of comments, with single spaces."""
    return " ".join(re.sub(r"[#*/;!%-]+", " ", text).lower().split())


def allowed(expression: str, names: tuple[str, ...]) -> bool:
    """Whether an SPDX expression can be met with the licences `names` (SPDX 2.3, annex D: AND binds tighter than OR).
    One that cannot be read is not allowed."""
    wanted = {name.lower() for name in names}
    tokens = re.findall(r"[()]|[^\s()]+", expression)[::-1]

    def either() -> bool:
        met = both()
        while tokens and tokens[-1].upper() == "OR":
            tokens.pop()
            met |= both()
        return met

    def both() -> bool:
        met = single()
        while tokens and tokens[-1].upper() == "AND":
            tokens.pop()
            met &= single()
        return met

    def single() -> bool:
        token = tokens.pop() if tokens else ")"
        if token == "(":
            met = either()
            return bool(tokens) and tokens.pop() == ")" and met
        if len(tokens) >= 2 and tokens[-1].upper() == "WITH":  # an exception only allows more
            del tokens[-2:]
        return token.lower() in wanted

    return either() and not tokens
