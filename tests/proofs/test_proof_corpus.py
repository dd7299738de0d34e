"""Claims about corpora: what is planted is found; kills, workers, ranks and Ray leave the bytes as they are; bad
input and a full disk lose nothing and say what they cost."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tutti.data.corpus import Pipeline, Source, read_documents
from tutti.data.corpus.files import read_json
from tutti.data.corpus.pipeline import Corpus, finished
from tutti.data.corpus.steps import (
    Decontaminate,
    Duplicates,
    Extract,
    Language,
    Lines,
    MaskPii,
    NearDuplicates,
    Repair,
    Rules,
)
from tutti.whole_files import UNFINISHED

CONFIG = """
[corpus]
out = "{out}"
split = 60000

[[source]]
path = "{raw}"
domain = "web"

[[step]]
type = "repair"

[[step]]
type = "duplicates"

[[step]]
type = "rules"
tables = ["gopher_quality"]

[[step]]
type = "near_duplicates"

[[step]]
type = "duplicates"
unit = "span"
words = 20
"""


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("the", "of", "to", f"word{rng.randrange(5000)}")) for _ in range(count))


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """Documents with exact and near repeats, and garbage."""
    rng, folder, texts = random.Random(0), tmp_path_factory.mktemp("raw"), []
    for _ in range(1500):
        kind = rng.random()
        if texts and kind < 0.1:
            texts.append(rng.choice(texts))
        elif texts and kind < 0.2:
            parts = rng.choice(texts).split()
            texts.append(" ".join([*parts[: len(parts) * 9 // 10], *words(rng, 8).split()]))
        else:
            texts.append(words(rng, rng.randrange(20, 200)))
    for k in range(3):
        rows = [json.dumps({"id": f"d{i}", "text": t}) for i, t in enumerate(texts) if i % 3 == k]
        (folder / f"{k}.jsonl").write_text("\n".join([*rows, '{"text": "cut off']) + "\n")
    return folder


def config(tmp_path: Path, raw: Path, out: str = "out") -> Path:
    path = tmp_path / "corpus.toml"
    path.write_text(CONFIG.format(out=tmp_path / out, raw=raw))
    return path


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "tutti", *map(str, args)]


def prepared(tmp_path: Path, raw: Path, *args: object, launcher: tuple[str, ...] = ()) -> Corpus:
    call = command(*launcher, "corpus", "run", config(tmp_path, raw), *args)
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    corpus = finished(tmp_path / "out")
    assert corpus is not None
    return corpus


@pytest.fixture(scope="module")
def whole(tmp_path_factory, raw) -> Corpus:
    """The corpus as one undisturbed process makes it."""
    corpus = prepared(tmp_path_factory.mktemp("whole"), raw, "--workers", 0)
    assert 900 < corpus.documents < 1400
    return corpus


def same(a: Corpus, b: Corpus) -> bool:
    """Whether two corpora have the same bytes, of documents, of what was dropped, and the same accounts."""
    names = [sorted(p.relative_to(x.folder) for p in x.folder.rglob("*.parquet")) for x in (a, b)]
    if names[0] != names[1] or any((a.folder / n).read_bytes() != (b.folder / n).read_bytes() for n in names[0]):
        return False
    accounts = [[{**vars(s), "seconds": 0} for s in x.accounts] for x in (a, b)]
    return accounts[0] == accounts[1] and a.manifest["files"] == b.manifest["files"]


@pytest.mark.parametrize("seed", range(20))
def test_runs_that_are_killed_at_random_moments_end_with_the_same_bytes(tmp_path, raw, whole, seed):
    """The process with all its workers, or one worker alone, is killed until the run is done."""
    rng, kills, latest = random.Random(seed), 0, 3.0
    for _ in range(40):
        process = subprocess.Popen(
            command("corpus", "run", config(tmp_path, raw), "--workers", 2),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if kills >= 4:
            assert process.wait() == 0
            break
        _until(lambda: (tmp_path / "out/work").exists() or process.poll() is not None)  # noqa: B023
        time.sleep(rng.uniform(0, latest))
        if process.poll() is not None and not kills:  # a machine on which it takes less: again, with an earlier kill
            latest /= 2
            shutil.rmtree(tmp_path / "out")
            continue
        if process.poll() is not None:
            break
        if rng.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()  # its workers end by themselves
        process.wait()
        kills += 1
    corpus = finished(tmp_path / "out")
    assert corpus is not None and kills > 0 and same(corpus, whole)
    assert not list((tmp_path / "out").rglob(f"*{UNFINISHED}"))


def _until(holds) -> None:
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


def test_ranks_of_a_job_share_the_work(tmp_path, raw, whole):
    assert same(prepared(tmp_path, raw, launcher=("run", "-n", "2", "-m", "tutti")), whole)


def test_two_workers_of_ray_equal_one_process(tmp_path, raw, whole, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not a cluster that another test has started
    assert same(prepared(tmp_path, raw, "--ray"), whole)


def test_bad_input_is_counted_and_named(tmp_path):
    """A truncated gzip file, invalid UTF-8, a line of 2 GB, binary files, an empty shard, one malformed record."""
    import gzip

    raw = tmp_path / "raw"
    raw.mkdir()
    rows = [json.dumps({"id": f"g{i}", "text": f"text number {i}"}) for i in range(3000)]
    content = gzip.compress("\n".join(rows).encode())
    (raw / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    (raw / "b.jsonl").write_bytes(b'{"text": "before"}\n{"text": "\xff"}\n{"text": \n{"text": "after"}\n')
    with open(raw / "c.jsonl", "wb") as file:
        file.write(b'{"text": "before the line"}\n{"text": "')
        for _ in range(200):
            file.write(b"x" * (10 << 20))
        file.write(b'"}\n{"text": "after the line"}\n')
    (raw / "d.jsonl").write_bytes(b"")
    (raw / "e.txt").write_bytes(os.urandom(1000))
    (raw / "f.parquet").write_bytes(b"no parquet at all")
    path = tmp_path / "corpus.toml"
    path.write_text(f'[corpus]\nout = "{tmp_path}/out"\n[[source]]\npath = "{raw}"\n[[step]]\ntype = "duplicates"\n')
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(command("corpus", "run", path, "--workers", 1), capture_output=True, text=True)
    assert done.returncode == 1
    assert "a.jsonl.gz: truncated" in done.stderr and "f.parquet: corrupt" in done.stderr
    corpus = finished(tmp_path / "out")
    assert corpus is not None
    dropped = corpus.accounts[0].dropped
    whole = corpus.documents - 4
    assert 500 < whole < 3000 and dropped["not_utf8"][0] == 1 and dropped["binary_file"][0] == 1
    assert dropped["record_too_long"] == [1, (200 << 20) * 10 + 12]
    assert dropped["malformed_json"][0] in (1, 2)  # and perhaps the last record of the truncated file
    assert corpus.accounts[0].documents_in == corpus.documents + sum(x[0] for x in dropped.values())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak < max(before, 1 << 20), "a process took more than 1 GiB for a line of 2 GB"


def test_a_disk_that_is_full(tmp_path, raw, whole):
    """On a file system of 300 kB the run ends with an error; with room it ends with the same bytes."""
    out = tmp_path / "out"
    out.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tutti", str(out).encode(), b"tmpfs", 0, b"size=300k"):
        pytest.skip(f"a small file system cannot be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        done = subprocess.run(command("corpus", "run", config(tmp_path, raw)), capture_output=True, text=True)
        assert done.returncode == 1 and "No space left on device" in done.stderr, done.stderr
        assert finished(out) is None
        for manifest in (out / "work").rglob("[0-9]*.json"):
            for name, entry in read_json(manifest)["files"].items():
                assert (manifest.parent / name).stat().st_size == entry["size"], "an incomplete file is in a manifest"
        assert not libc.mount(b"tutti", str(out).encode(), b"tmpfs", 32, b"size=100m")  # MS_REMOUNT
        assert same(prepared(tmp_path, raw), whole)
    finally:
        libc.umount2(str(out).encode(), 2)


@pytest.fixture(scope="module")
def planting():
    """The modules of the planted corpus, and its sentences, which are learned from the texts of installed packages."""
    path = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, path)
    try:
        names = ("planted_text", "planted_corpus", "planted_pages", "planted_score")
        modules = {name.removeprefix("planted_"): importlib.import_module(name) for name in names}
        yield modules, modules["text"].pool()
    finally:
        sys.path.remove(path)


def test_what_is_planted_is_found_and_nothing_else(tmp_path, planting):
    """Every kind of garbage, copies, languages, personal data, faults of encodings and evaluation texts: recall 1, and
    of the documents that nothing was planted in none is lost."""
    modules, text = planting
    manifest = modules["corpus"].write(tmp_path / "planted", 12_000_000, text=text, seed=5)
    steps = [
        Repair(), Duplicates(equal="words"), Language(keep=("en",)), Rules(("gopher_repetition", "gopher_quality")),
        Lines(punctuation=False), Rules(("fineweb",)), NearDuplicates(), MaskPii(),
        Decontaminate((str(tmp_path / "planted/evaluation.jsonl"),)),
    ]  # fmt: skip
    source = Source(str(tmp_path / "planted/documents"))
    corpus = Pipeline(steps, [source], tmp_path / "out", split=2 << 20).run(workers=2)
    rows = [r for p in corpus.files for b in read_documents(p, ["id", "text"]) for r in b.to_pylist()]
    score = modules["score"].score_kept(tmp_path / "planted", {r["id"] for r in rows}, manifest["documents"])
    caught = score["caught"]
    assert score["lost"] == 0 and score["alone"] > 1000 and score["groups lost"] == 0
    assert caught["garbage"] == caught["language"] == caught["exact"] == caught["contaminated"] == 1
    assert caught["near_miss"] == 0 and caught["lookalike"] < 0.05
    assert caught["boilerplate"] < 0.1, "short documents with equal headers may be near copies"
    assert all(caught[f"normalized {form}"] == 1 for form in ("case", "punctuation", "unicode", "whitespace"))
    assert all(share == 1 for kind, share in caught.items() if kind in ("near 0.90", "near 0.95"))
    assert all(share == 0 for kind, share in caught.items() if kind in ("near 0.25", "near 0.30", "near 0.35"))
    texts = modules["score"].score_texts(tmp_path / "planted", rows)
    private = {kind: share for kind, share in texts["masked"].items() if not kind.endswith("_private")}
    assert len(private) > 15 and set(private.values()) == {1.0}
    assert texts["masked"]["ipv4_private"] == 0, "addresses of local networks name nobody"
    assert set(texts["lookalikes"].values()) == {1.0} and len(texts["lookalikes"]) > 10
    assert set(texts["lines"].values()) == {1.0} and set(texts["repaired"].values()) == {1.0}


def test_near_copies_are_found_as_often_as_theory_says(tmp_path, planting):
    """Copies with exact Jaccard similarities from 0.3 to 0.95 against 1 - (1 - s^8)^14."""
    modules, text = planting
    shares = {"clean": 0.8, "near": 0.2}
    modules["corpus"].write(tmp_path / "planted", 12_000_000, text=text, seed=6, shares=shares)
    corpus = Pipeline([NearDuplicates()], [Source(str(tmp_path / "planted/documents"))], tmp_path / "out").run(0)
    ids = {i for p in corpus.files for b in read_documents(p, ["id"]) for i in b.column("id").to_pylist()}
    truth = modules["corpus"].read_truth(tmp_path / "planted")
    uses = Counter(fact["of"] for fact in truth.values())
    pairs = [(f["jaccard"], n not in ids or f["of"] not in ids) for n, f in truth.items() if uses[f["of"]] == 1
             and f["of"] not in truth and not uses[n]]  # fmt: skip
    law = np.array([1 - (1 - s**8) ** 14 for s, _ in pairs])
    hits = np.array([hit for _, hit in pairs])
    assert len(pairs) > 200
    assert abs(hits.sum() - law.sum()) < 4 * np.sqrt((law * (1 - law)).sum()), (hits.sum(), law.sum())


def test_pages_give_their_text_and_not_their_menus(tmp_path, planting):
    """WARC files with articles among menus, banners and scripts; in several encodings, compressed, chunked, with
    responses that are no pages."""
    modules, text = planting
    modules["pages"].write(tmp_path / "pages", 1_000_000, text=text, seed=1)
    source = Source(str(tmp_path / "pages/*.warc.gz"))
    scores = {}
    for extractor in ("resiliparse", "trafilatura"):
        out = tmp_path / extractor
        corpus = Pipeline([Extract(extractor)], [source], out).run(workers=2)
        rows = [r for p in corpus.files for b in read_documents(p) for r in b.to_pylist()]
        scores[extractor] = modules["pages"].score(tmp_path / "pages", {r["url"]: r["text"] for r in rows})
        assert scores[extractor]["inside"] > 0.97 and scores[extractor]["no document"] == 1, scores
    assert scores["resiliparse"]["outside"] > 0.85 and scores["trafilatura"]["outside"] > 0.9, scores
