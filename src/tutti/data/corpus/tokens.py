"""Tokens of a finished corpus in the packed format of `tutti train`: a task for each shard, then one file each.

Every document ends with the end-of-text token, so boundaries are in the tokens (`tutti.data.packing`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

import numpy as np

from tutti.data.corpus.files import atomic, fraction, read_json, write_json
from tutti.data.corpus.pipeline import Corpus, Pool, do
from tutti.data.corpus.reading.documents import read_documents
from tutti.data.corpus.shard import Context
from tutti.data.corpus.tasks import Task
from tutti.data.packing import Packed, open_packed
from tutti.data.tokenizer import encode, load_tokenizer, train_tokenizer
from tutti.progress import Count
from tutti.whole_files import whole_folder

NAMES = ("train", "held_out")


@dataclass(frozen=True)
class TokenTask(Task):
    """Tokenize one file of documents into `folder`: those to train on and those held out."""

    ticks: ClassVar[bool] = True
    documents: Path
    tokenizer: Path
    folder: Path
    held_out: float
    dtype: str

    @property
    def manifest(self) -> Path:
        return self.folder / f"{self.documents.name.partition('.')[0]}.json"

    @property
    def name(self) -> str:
        return f"tokens of {self.documents.name}"

    def run(self, context: Context) -> None:
        tokenizer = load_tokenizer(self.tokenizer)
        paths = [self.folder / f"{self.manifest.stem}.{name}.bin" for name in NAMES]
        counts = {name: {"tokens": 0, "documents": 0, "text_bytes": 0} for name in NAMES}
        with atomic(paths[0]) as train, atomic(paths[1]) as held_out:
            files = {"train": train, "held_out": held_out}
            for texts in _texts(self.documents):
                sides = ["held_out" if fraction(text) < self.held_out else "train" for text in texts]
                for text, ids, side in zip(texts, encode(tokenizer, texts), sides, strict=True):
                    files[side].write(np.array(ids, self.dtype).tobytes())
                    counts[side]["tokens"] += len(ids)
                    counts[side]["documents"] += 1
                    counts[side]["text_bytes"] += len(text.encode())
                context.tick(len(texts), sum(map(len, texts)))
        entries = {path.name: files[name].entry for path, name in zip(paths, NAMES, strict=True)}
        write_json(self.manifest, {"files": entries, "counts": counts})


def sample(corpus: Corpus, size: float) -> Iterator[str]:
    """About `size` bytes of the documents of a corpus, those whose hashes are lowest."""
    limit = size / max(corpus.manifest["bytes"], 1)
    for path in corpus.files:
        for texts in _texts(path):
            yield from (text for text in texts if fraction(text) < limit)


def learn_tokenizer(corpus: Corpus, vocab_size: int, size: float, folder: Path) -> None:
    """Learn a tokenizer from `size` bytes of a corpus and save it as a folder, which replaces the one that is there."""
    with whole_folder(folder) as draft:
        train_tokenizer(sample(corpus, size), vocab_size).save_pretrained(draft)


def tokenize(
    corpus: Corpus, tokenizer: Path, folder: Path, held_out: float, pool: Pool, show: Callable[[str], Count]
) -> dict[str, Packed]:
    """Write `train.bin` and `held_out.bin` with their JSON into a folder. Returns what is there if it is finished.

    held_out: the fraction of documents, by hash, that are not trained on.
    """
    if all(open_packed(folder, name) is not None for name in NAMES):
        return {name: packed for name in NAMES if (packed := open_packed(folder, name))}
    dtype = "<u2" if len(load_tokenizer(tokenizer)) <= 2**16 else "<u4"
    shards = folder / "shards"
    tasks = [TokenTask(path, tokenizer, shards, held_out, dtype) for path in corpus.files]
    do(tasks, pool, show("tokens"))
    for name in NAMES:
        sums = {"tokens": 0, "documents": 0, "text_bytes": 0}
        with atomic(folder / f"{name}.bin") as file:
            for task in tasks:
                counts = read_json(task.manifest)["counts"][name]
                sums = {key: value + counts[key] for key, value in sums.items()}
                with open(shards / f"{task.manifest.stem}.{name}.bin", "rb") as part:
                    while data := part.read(1 << 22):
                        file.write(data)
        write_json(folder / f"{name}.json", {"dtype": dtype, **sums})
    shutil.rmtree(shards)
    return {name: packed for name in NAMES if (packed := open_packed(folder, name))}


def _texts(path: Path) -> Iterator[list[str]]:
    for batch in read_documents(path, ["text"]):
        texts = batch.column("text").to_pylist()
        yield from (texts[k : k + 256] for k in range(0, len(texts), 256))


def tokens_key(corpus: Corpus, tokenizer: Path, held_out: float) -> str:
    """What the tokens depend on."""
    return blake2b(json.dumps([corpus.key, tokenizer.name, held_out]).encode(), digest_size=8).hexdigest()
