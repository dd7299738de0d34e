"""The corpus benchmark: what it measures of a command, and how it holds the documents kept against the truth."""

import importlib
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def corpus():
    sys.path.insert(0, str(PATH))
    try:
        yield importlib.import_module("corpus")
    finally:
        sys.path.remove(str(PATH))


def test_kept_documents_are_held_against_the_truth(corpus, tmp_path):
    truth = [
        {"id": "000000002", "kind": "exact", "of": "000000000", "jaccard": 1.0},
        {"id": "000000003", "kind": "near", "of": "000000001", "jaccard": 0.82},
        {"id": "000000004", "kind": "chain", "of": "000000003", "jaccard": 0.85, "root": "000000001"},
        {"id": "000000009", "kind": "near", "of": "000000007", "jaccard": 0.31},
        {"id": "000000005", "kind": "garbage", "rule": "gopher/hashes"},
        {"id": "000000006", "kind": "lookalike"},
    ]
    (tmp_path / "truth.jsonl").write_text("".join(json.dumps(x) + "\n" for x in truth))
    survivors = {"000000001", "000000006", "000000007", "000000009"}
    score = corpus.planted_score.score_kept(tmp_path, survivors, documents=10)
    assert score["caught"] == {"exact": 1.0, "chain": 1.0, "near 0.30": 0.0, "garbage gopher/hashes": 1.0,
                               "garbage": 1.0, "lookalike": 0.0}  # fmt: skip
    assert score["of"]["chain"] == 1 and "near 0.80" not in score["of"], "of a near copy with a copy of its own"
    assert (score["lost"], score["alone"], score["removed"]) == (1, 1, 6)
    assert (score["groups"], score["groups lost"]) == (3, 1), "both documents of the exact copy are gone"


def test_texts_are_held_against_the_truth(corpus, tmp_path):
    truth = [
        {"id": "0", "kind": "private", "private": [["email", "a@b.org"], ["ssn", "123-45-6789"]]},
        {"id": "1", "kind": "lookalike", "lookalikes": [["time", "10:11:12"], ["time", "13:14:15"]]},
        {"id": "2", "kind": "lines", "rule": "c4/javascript", "lines": ["Enable JavaScript."]},
        {"id": "3", "kind": "encoding", "fault": "latin-1", "expected": "caf\u00e9"},
        {"id": "4", "kind": "boilerplate", "lines": ["Shared."]},
    ]
    (tmp_path / "truth.jsonl").write_text("".join(json.dumps(x) + "\n" for x in truth))
    texts = ["write to <EMAIL>, 123-45-6789", "at 10:11:12 and <PHONE>", "One line.", " caf\u00e9\n", "Shared."]
    score = corpus.planted_score.score_texts(tmp_path, [{"id": str(i), "text": x} for i, x in enumerate(texts)])
    assert score == {"masked": {"email": 1.0, "ssn": 0.0}, "lookalikes": {"time": 0.5}, "lines": {"c4/javascript": 1.0},
                     "repaired": {"latin-1": 1.0}}  # fmt: skip


@pytest.mark.starts
def test_processes_that_outlive_their_parent_count(corpus, tmp_path):
    """As those of a fork server do: the child begins to work when its parent has ended."""
    script = """
import os, sys, time
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        pass
    block = bytearray(150_000_000)
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
    os._exit(0)
open(sys.argv[1] + "/kept.txt", "w").write("000000000\\n000000001\\n")
"""
    run = corpus.measured(
        "test", [sys.executable, "-c", script, str(tmp_path / "out")], tmp_path / "out", documents=5, limit=60
    )
    assert run.survivors == {"000000000", "000000001"} and run.documents == 5
    assert run.cpu >= 0.4 and run.peak > 150_000_000 and run.disk == 20


@pytest.mark.starts
def test_a_command_that_fails_says_where_its_output_is(corpus, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)a peer ended with 3; its output is in .*log.txt:\nno such model"):
        command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
        corpus.measured("a peer", command, tmp_path / "out", documents=1, limit=60)
    with pytest.raises(RuntimeError, match="ended with a timeout"):
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        corpus.measured("a peer", command, tmp_path / "again", documents=1, limit=0.3)
