"""What a preparation of a planted corpus has done, held against the truth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import planted_corpus

COPIES = ("exact", "normalized", "near", "chain")
Truth = Mapping[str, dict[str, Any]]


class _Shares:
    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def count(self, label: str, right: bool) -> None:
        self._counts[label][0] += right
        self._counts[label][1] += 1

    def shares(self) -> dict[str, float]:
        return {x: a / b for x, (a, b) in sorted(self._counts.items())}

    def numbers(self) -> dict[str, int]:
        return {x: b for x, (_, b) in sorted(self._counts.items())}


def score_kept(folder: Path, survivors: set[str], documents: int) -> dict[str, Any]:
    """What of the planted was caught, by kind, and what was lost.

    survivors: ids. documents: how many there are. `caught`: the share removed of a kind; of copies, of pairs of which
    one is removed, those of `near` by their exact similarity in steps of 0.05. Pairs count that have no other copy,
    which might be what one was removed for, and all those of chains. `of`: how many count. `lost`: documents removed
    that nothing was planted in, of `alone`. `groups lost`: documents that no copy was left of, of `groups`.
    """
    truth = planted_corpus.read_truth(folder)
    groups, caught = _groups(truth), _Shares()
    copied = set().union(*groups)
    pairs = set().union(*(x for x in groups if len(x) == 2))
    for name, fact in truth.items():
        kind, gone = fact["kind"], name not in survivors
        if kind in COPIES:
            if name not in pairs and kind != "chain":
                continue
            label = f"near {int(fact['jaccard'] * 20 + 1e-9) / 20:.2f}" if kind == "near" else kind
            caught.count(f"{label} {fact['form']}" if "form" in fact else label, gone or fact["of"] not in survivors)
        else:
            caught.count(kind, gone)
            if kind == "garbage":
                caught.count(f"garbage {fact['rule']}", gone)
    alone = {f"{i:09d}" for i in range(documents)} - truth.keys() - copied
    return {"caught": caught.shares(), "of": caught.numbers(), "lost": len(alone - survivors), "alone": len(alone),
            "removed": documents - len(survivors), "groups": len(groups),
            "groups lost": sum(not x & survivors for x in groups)}  # fmt: skip


def _groups(truth: Truth) -> list[set[str]]:
    """Documents with all copies of them and copies of those."""
    groups: dict[str, set[str]] = {}
    for name, fact in truth.items():  # a copy stands after what it was made of
        if fact["kind"] in COPIES:
            group = groups.setdefault(fact["of"], {fact["of"]})
            group.add(name)
            groups[name] = group
    return list({id(x): x for x in groups.values()}.values())


def score_texts(folder: Path, documents: Iterable[Mapping[str, str]]) -> dict[str, dict[str, float]]:
    """What was done to the texts of the documents that were kept (`id` and `text`).

    Shares: `masked`, private strings, by kind, that are gone. `lookalikes`, by kind, that are left. `lines`, by rule,
    that are gone. `repaired`, texts, by fault, that are as they were before it.
    """
    truth = planted_corpus.read_truth(folder)
    masked, lookalikes, lines, repaired = _Shares(), _Shares(), _Shares(), _Shares()
    for document in documents:
        fact, text = truth.get(document["id"], {}), document["text"]
        for kind, string in fact.get("private", ()):
            masked.count(kind, string not in text)
        for kind, string in fact.get("lookalikes", ()):
            lookalikes.count(kind, string in text)
        if "rule" in fact:
            for line in fact.get("lines", ()):
                lines.count(fact["rule"], line not in text)
        if "fault" in fact:
            repaired.count(fact["fault"], text.split() == fact["expected"].split())
    return {"masked": masked.shares(), "lookalikes": lookalikes.shares(), "lines": lines.shares(),
            "repaired": repaired.shares()}  # fmt: skip
