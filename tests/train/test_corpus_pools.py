"""Ranks of a job do the tasks of a corpus: a document that ends its process costs no rank."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing

import pyarrow as pa
import pytest

from tutti.data.corpus import CorpusError, Function, Pipeline, Source
from tutti.train.corpus_pools import Ranks


def kill_on_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    if any("poison" in text for text in batch.column("text").to_pylist()):
        os.kill(os.getpid(), 9)
    return batch


def fail_on_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    if any("poison" in text for text in batch.column("text").to_pylist()):
        raise ValueError("poison")
    return batch


@pytest.fixture
def ranks(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    with closing(Ranks()) as pool:
        yield pool


@pytest.fixture
def source(tmp_path):
    texts = [*(f"text {k}" for k in range(50)), "poison", "the last"]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return Source(str(tmp_path / "raw.jsonl"))


def test_a_document_that_ends_its_process_is_left_out(ranks, source, tmp_path):
    corpus = Pipeline([Function(kill_on_poison)], [source], tmp_path / "out", split=300).run(pool=ranks)
    assert corpus.documents == 51
    assert corpus.accounts[1].dropped["crashed"][0] == 1


def test_an_error_in_a_step_names_the_shard(ranks, source, tmp_path):
    with pytest.raises(CorpusError, match=r"shard \d of \d \(raw.jsonl.*ValueError: poison"):
        Pipeline([Function(fail_on_poison)], [source], tmp_path / "out", split=300).run(pool=ranks)
