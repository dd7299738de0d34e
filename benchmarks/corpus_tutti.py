"""Tutti's side of `benchmarks/corpus.py`: `python corpus_tutti.py RECIPE DOCUMENTS OUT [WORKERS]` writes
OUT/kept.txt."""

from __future__ import annotations

import sys
from pathlib import Path

from tutti.data.corpus import Pipeline, Source, Step, read_documents
from tutti.data.corpus.steps import Duplicates, Language, Lines, MaskPii, NearDuplicates, Repair, Rules

FINEWEB: tuple[Step, ...] = (
    Language(keep=("en",)),
    Rules(("gopher_repetition", "gopher_quality")),
    Lines(punctuation=False),
    Rules(("fineweb",)),
    NearDuplicates(),
    MaskPii(),
)
"""What datatrove does in `corpus_peers.py`: FineWeb's recipe on text."""

MEMORY = 256 << 20  # bytes for looking at hashes
RECIPES: dict[str, tuple[Step, ...]] = {
    "fineweb": FINEWEB,
    "repaired": (Repair(), Duplicates(equal="words"), *FINEWEB),
    "all": (Repair(), Duplicates(), *FINEWEB, Duplicates(unit="line"), Duplicates(unit="span")),
    "minhash": (NearDuplicates(),),
    "exact": (Duplicates(),),
}


def main() -> None:
    recipe, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    workers = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    corpus = Pipeline(RECIPES[recipe], [Source(str(folder))], out / "corpus", split=16 << 20, memory=MEMORY).run(
        workers
    )
    ids = (b.column("id").to_pylist() for path in corpus.files for b in read_documents(path, ["id"]))
    (out / "kept.txt").write_text("\n".join(x for part in ids for x in part))


if __name__ == "__main__":
    main()
