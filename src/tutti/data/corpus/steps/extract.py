"""Text from HTML pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import pyarrow as pa

from tutti.data.corpus.documents import Outcome, replace
from tutti.data.corpus.steps.step import Step, needs


@dataclass(frozen=True)
class Extract(Step):
    """Extract the main text of pages into `text`, and drop the pages.

    extractor: "resiliparse" (Bevendorff et al. 2018; C++, dozens of times faster) or "trafilatura" (Barbaresi 2021;
        fewer lines of menus, slower).
    """

    kind: ClassVar[str] = "extract"
    extractor: str = "resiliparse"

    def __post_init__(self):
        if self.extractor not in _EXTRACTORS:
            raise ValueError(f"extract: no extractor {self.extractor!r}; give {' or '.join(_EXTRACTORS)}")
        needs(self.extractor)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "extractor version": metadata.version(self.extractor)}

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        extract = _EXTRACTORS[self.extractor]()
        values: list[str] = []
        reasons: list[str | None] = []
        details: list[str | None] = []
        for page, text in zip(batch.column("raw").to_pylist(), batch.column("text").to_pylist(), strict=True):
            reason = detail = None
            if page is not None:
                try:
                    text = extract(page).strip()
                    reason = None if text else "no_text"
                except Exception as error:  # of any parser, on any page
                    reason, detail = "not_parsed", f"{type(error).__name__}: {error}"
            values.append(text.encode("utf-8", "replace").decode())
            reasons.append(reason)
            details.append(detail)
        batch = replace(batch, "text", pa.array(values, pa.string()))
        return Outcome(replace(batch, "raw", pa.nulls(len(batch), pa.binary())), reasons, details)


def _resiliparse() -> Callable[[bytes], str]:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import detect_encoding
    from resiliparse.parse.html import HTMLTree

    def extract(page: bytes) -> str:
        tree = HTMLTree.parse_from_bytes(page, detect_encoding(page, html5_compatible=True) or "utf-8")
        return extract_plain_text(tree, main_content=True, alt_texts=False, list_bullets=True, links=False)

    return extract


def _trafilatura() -> Callable[[bytes], str]:
    import trafilatura

    def extract(page: bytes) -> str:
        return trafilatura.extract(page, favor_precision=True, include_comments=False, deduplicate=True) or ""

    return extract


_EXTRACTORS = {"resiliparse": _resiliparse, "trafilatura": _trafilatura}
