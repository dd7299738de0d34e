"""A corpus with known truth: JSONL files of documents, and beside them what was planted in which.

    python benchmarks/planted_corpus.py FOLDER --size 100MB [--seed 0] [--compression none|gz|zst] [--pages]

Writes FOLDER/documents/00000.jsonl and on (`id`, `text`, `url`, `domain`), FOLDER/truth.jsonl (one line for each
document that is more than clean text), FOLDER/evaluation.jsonl (`id`, `question`, `answer`) and FOLDER/manifest.json.
Equal seeds, sizes and versions of the packages that text is taken from give equal bytes. A document depends on the seed
and its number alone, but for links of chains, which follow the one before. A line of the truth has `id`, `kind` and

- `exact`, `normalized` (`form`), `near`, `chain`: `of`, the document that it is a copy of, always an earlier one, and
  `jaccard`, their exact similarity (planted_text.jaccard: sets of five words). A chain begins with its `root`.
- `language`: `language`. `garbage`: `rule`, which must remove it. `lines`: `lines`, which `rule` must remove, the rest
  of the document staying. `boilerplate`: `lines`, which many documents share.
- `private`: `private`, pairs of a kind and a string. `lookalike`: `lookalikes`, pairs likewise, none to be masked.
- `contaminated`: `evaluation` (an id), `form`, `sequence` as it stands in the document. `near_miss`: the same, of
  eight words, which is too short.
- `encoding`: `fault`, and `expected`, the text without it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import planted_kinds as kinds
from planted_private import LOOKALIKES, PRIVATE, sentence
from planted_text import PACKAGES, Pool, jaccard, pool

SHARES = {
    "clean": 0.56, "language": 0.06, "garbage": 0.10, "lines": 0.03, "exact": 0.04, "normalized": 0.02, "near": 0.07,
    "chain": 0.02, "boilerplate": 0.02, "private": 0.03, "lookalike": 0.015, "contaminated": 0.01, "near_miss": 0.005,
    "encoding": 0.02,
}  # fmt: skip
SIMILARITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
CHAIN, CHAIN_SIMILARITY = 3, 0.82  # links after the first document; of each to the one before
EVALUATION = 100
SITES = ("docs", "news", "blog", "wiki", "shop", "forum", "lab", "city", "press", "notes")
DOMAINS = [f"{x}.example.{y}" for x in SITES for y in ("com", "org", "net", "de", "io")]

Record = tuple[dict[str, str], dict[str, Any] | None]


class Corpus:
    """Documents by number, without end. shares: weights of the kinds; they are scaled to one."""

    def __init__(self, text: Pool, seed: int = 0, shares: dict[str, float] | None = None):
        self.pool, self.seed = text, seed
        shares = SHARES if shares is None else shares
        if unknown := shares.keys() - SHARES.keys():
            raise ValueError(f"there is no kind {min(unknown)!r}; kinds: {', '.join(SHARES)}")
        if not shares.get("clean"):
            raise ValueError("a corpus needs a share of clean documents: copies are made of them")
        self._names = list(shares)
        self._bounds = [x / sum(shares.values()) for x in accumulate(shares.values())]
        self.evaluation = self._evaluation()
        draw = random.Random(seed * 7919 + 1)
        self._shared = [" ".join(kinds.paragraphs(text, draw, 3)) for _ in range(12)]
        self._link: tuple[int, str, int, int] | None = None  # the last of a chain: number, text, root, how many

    def __iter__(self) -> Iterator[Record]:
        self._link = None
        return map(self.document, count())

    def document(self, number: int) -> Record:
        """A document and the line about it (None: clean)."""
        kind, rng = self._kind(number)
        name = f"{number:09d}"
        text, truth = getattr(self, f"_{kind}")(number, rng)
        domain = DOMAINS[number * 2654435761 % len(DOMAINS)]
        record = {"id": name, "text": text, "url": f"https://{domain}/{number % 97}/{name}", "domain": domain}
        return record, None if truth is None else {"id": name, "kind": kind, **truth}

    def _kind(self, number: int) -> tuple[str, random.Random]:
        rng = random.Random(self.seed << 40 | number)
        return self._names[bisect(self._bounds, rng.random(), hi=len(self._names) - 1)], rng

    def _text(self, number: int) -> str:
        """The text of a clean document, again."""
        return kinds.clean(self.pool, self._kind(number)[1])

    def _earlier(self, number: int, rng: random.Random) -> int | None:
        for _ in range(200):
            other = int(rng.random() * number)
            if other < number and self._kind(other)[0] == "clean":
                return other
        return None  # at the very beginning

    def _copied(self, number: int, rng: random.Random, change: Any, **truth: Any) -> tuple[str, dict | None]:
        if (of := self._earlier(number, rng)) is None:
            return kinds.clean(self.pool, rng), {"kind": "clean"}
        original = self._text(of)
        text = change(original)
        return text, {"of": f"{of:09d}", "jaccard": jaccard(original, text), **truth}

    def _clean(self, number: int, rng: random.Random) -> tuple[str, None]:
        return kinds.clean(self.pool, rng), None

    def _language(self, number: int, rng: random.Random) -> tuple[str, dict]:
        code = rng.choice(list(self.pool.languages))
        sentences = self.pool.languages[code]
        chosen = [rng.choice(sentences) for _ in range(rng.randrange(8, 40))]
        return "\n".join(" ".join(chosen[i : i + 4]) for i in range(0, len(chosen), 4)), {"language": code}

    def _garbage(self, number: int, rng: random.Random) -> tuple[str, dict]:
        rule = rng.choice(list(kinds.RULES))
        return kinds.RULES[rule](self.pool, rng), {"rule": rule}

    def _lines(self, number: int, rng: random.Random) -> tuple[str, dict]:
        rule = rng.choice(list(kinds.LINES))
        lines = [kinds.LINES[rule](self.pool, rng) for _ in range(rng.randrange(1, 3))]
        return self._with(lines, rng), {"rule": rule, "lines": lines}

    def _with(self, lines: list[str], rng: random.Random) -> str:
        """A clean document with these lines at places of their own."""
        parts = kinds.paragraphs(self.pool, rng, rng.randrange(30, 80))
        for line in lines:
            parts.insert(rng.randrange(len(parts) + 1), line)
        return "\n".join(parts)

    def _exact(self, number: int, rng: random.Random) -> tuple[str, dict | None]:
        return self._copied(number, rng, lambda x: x)

    def _normalized(self, number: int, rng: random.Random) -> tuple[str, dict | None]:
        form = rng.choice(list(kinds.FORMS))
        return self._copied(number, rng, lambda x: kinds.FORMS[form](x, rng), form=form)

    def _near(self, number: int, rng: random.Random) -> tuple[str, dict | None]:
        goal = rng.choice(SIMILARITIES)
        return self._copied(number, rng, lambda x: kinds.near(x, goal, self.pool, rng), goal=goal)

    def _chain(self, number: int, rng: random.Random) -> tuple[str, dict | None]:
        if self._link is None or self._link[3] == CHAIN:
            if (of := self._earlier(number, rng)) is None:
                return kinds.clean(self.pool, rng), {"kind": "clean"}
            self._link = of, self._text(of), of, 0
        of, before, root, links = self._link
        text = kinds.near(before, CHAIN_SIMILARITY, self.pool, rng)
        self._link = number, text, root, links + 1
        return text, {"of": f"{of:09d}", "jaccard": jaccard(before, text), "root": f"{root:09d}"}

    def _boilerplate(self, number: int, rng: random.Random) -> tuple[str, dict]:
        lines = rng.sample(self._shared, rng.randrange(1, 3))
        return self._with(lines, rng), {"lines": lines}

    def _private(self, number: int, rng: random.Random) -> tuple[str, dict]:
        drawn = [(kind, PRIVATE[kind](rng)) for kind in rng.choices(list(PRIVATE), k=rng.randrange(1, 5))]
        return self._with([sentence(x, rng) for _, x in drawn], rng), {"private": drawn}

    def _lookalike(self, number: int, rng: random.Random) -> tuple[str, dict]:
        drawn = [(kind, LOOKALIKES[kind](rng)) for kind in rng.choices(list(LOOKALIKES), k=rng.randrange(1, 5))]
        return self._with([sentence(x, rng) for _, x in drawn], rng), {"lookalikes": drawn}

    def _contaminated(self, number: int, rng: random.Random, most: int = 60) -> tuple[str, dict]:
        item = rng.choice(self.evaluation)
        split = item["question"].split(" ")
        size = rng.randrange(13, min(most, len(split)) + 1)
        form = rng.choice(["verbatim", "case", "punctuation"])
        return self._planted(item, split, size, form, rng)

    def _near_miss(self, number: int, rng: random.Random) -> tuple[str, dict]:
        item = rng.choice(self.evaluation)
        return self._planted(item, item["question"].split(" "), 8, "verbatim", rng)

    def _planted(self, item: dict, split: list[str], size: int, form: str, rng: random.Random) -> tuple[str, dict]:
        at = rng.randrange(len(split) - size + 1)
        sequence = " ".join(split[at : at + size])
        if form == "case":
            sequence = sequence.upper() if rng.random() < 0.5 else sequence.title()
        elif form == "punctuation":
            sequence = ", ".join(x.strip(".,?!()") for x in sequence.split(" "))
        text = self._with([f"It was asked whether {sequence} was what they have had in mind."], rng)
        return text, {"evaluation": item["id"], "form": form, "sequence": sequence}

    def _encoding(self, number: int, rng: random.Random) -> tuple[str, dict]:
        fault = rng.choice(list(kinds.FAULTS))
        expected = kinds.accented(kinds.clean(self.pool, rng, 40))
        return kinds.FAULTS[fault](expected, rng), {"fault": fault, "expected": expected}

    def _evaluation(self) -> list[dict[str, str]]:
        rng = random.Random(self.seed * 7919 + 2)
        held_out = self.pool.held_out
        if len(held_out) < 10:
            raise ValueError(f"{len(held_out)} sentences are left for the evaluation set, at least 10 are needed: "
                             f"take text from more packages")  # fmt: skip
        size = min(EVALUATION, len(held_out))
        return [{"id": f"question-{i}", "question": x, "answer": rng.choice(self.pool.words)}
                for i, x in enumerate(rng.sample(held_out, size))]  # fmt: skip


def write(folder: str | Path, size: int, seed: int = 0, compression: str = "none", shard: int = 32_000_000,
          text: Pool | None = None, shares: dict[str, float] | None = None) -> dict[str, Any]:  # fmt: skip
    """Documents of at least `size` bytes of text in UTF-8, in files of about `shard` bytes of text; the manifest.

    Raises ValueError if the folder has documents of another corpus already.
    """
    folder = Path(folder)
    documents = folder / "documents"
    if documents.exists() and any(documents.iterdir()):
        raise ValueError(f"{documents} is not empty: choose another folder, or delete it")
    documents.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    corpus = Corpus(text or pool(), seed, shares)
    kinds: Counter[str] = Counter()
    total = filled = number = 0
    file: Any = None
    with open(folder / "truth.jsonl", "w") as truths:
        for record, truth in corpus:
            if file is None:
                file = _opened(documents / f"{number:05d}.jsonl", compression)
                number += 1
            file.write(json.dumps(record).encode() + b"\n")
            kind = "clean" if truth is None else truth["kind"]
            kinds[kind] += 1
            if truth is not None and kind != "clean":
                truths.write(json.dumps(truth) + "\n")
            length = len(record["text"] if record["text"].isascii() else record["text"].encode())
            total, filled = total + length, filled + length
            if filled >= shard or total >= size:
                file.close()
                file, filled = None, 0
            if total >= size:
                break
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(x) + "\n" for x in corpus.evaluation))
    manifest = {"seed": seed, "bytes": total, "documents": sum(kinds.values()), "files": number, "kinds": dict(kinds),
                "text": corpus.pool.fingerprint}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return {**manifest, "seconds": time.perf_counter() - begin}


def _opened(path: Path, compression: str) -> Any:
    if compression == "none":
        return open(path, "wb")
    if compression == "gz":
        return gzip.GzipFile(f"{path}.gz", "wb", compresslevel=1, mtime=0)
    if compression == "zst":
        import zstandard

        return zstandard.open(f"{path}.zst", "wb")
    raise ValueError(f"compression {compression!r} is not one of none, gz, zst")


def read_truth(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Lines of the truth by id."""
    with open(Path(folder) / "truth.jsonl") as lines:
        return {x["id"]: x for x in map(json.loads, lines)}


def parse_size(text: str) -> int:
    """Bytes of '100MB', '1.5GB' or '1000'."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("", 1)):
        if text.endswith(unit):
            try:
                return int(float(text[: len(text) - len(unit)]) * scale)
            except ValueError:
                break
    raise ValueError(f"size {text!r} is not a number of bytes such as 300MB or 1GB")


def main() -> None:
    parser = argparse.ArgumentParser(description="A corpus with known truth.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=parse_size, default=50_000_000, help="bytes of text, such as 300MB or 1GB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compression", choices=("none", "gz", "zst"), default="none")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="that text is taken from")
    parser.add_argument("--pages", action="store_true", help="HTML pages in WARC files beside them")
    options = parser.parse_args()
    text = pool(options.packages)
    print(json.dumps(write(options.folder, options.size, options.seed, options.compression, text=text)))
    if options.pages:
        import planted_pages

        print(json.dumps(planted_pages.write(options.folder / "pages", options.size // 10, options.seed, text)))


if __name__ == "__main__":
    main()
