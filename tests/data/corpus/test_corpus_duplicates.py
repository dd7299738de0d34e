"""Deduplication against brute force, and MinHash against theory."""

from __future__ import annotations

import json
import random

import numpy as np
import pyarrow as pa
import pytest
from corpus_batches import batch_of, write_jsonl

from tutti.data.corpus import Pipeline, Source, native, read_documents
from tutti.data.corpus.steps import Duplicates, NearDuplicates, Rules
from tutti.data.corpus.steps.duplicates import multipliers


def words(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(10**6)}" for _ in range(count)]


def clean(tmp_path, texts, *steps, split: int = 3000, **options):
    """The ids and texts that stay, in order, and what was dropped, {id: (reason, detail)}."""
    import pyarrow.parquet as pq

    source = write_jsonl(tmp_path / "in.jsonl", texts)
    corpus = Pipeline(steps, [Source(str(source))], tmp_path / "out", split=split, **options).run(workers=0)
    rows = [row for path in corpus.files for row in pq.read_table(path).to_pylist()]
    lost = [row for path in sorted((tmp_path / "out/dropped").iterdir()) for row in pq.read_table(path).to_pylist()]
    return {r["id"]: r["text"] for r in rows}, {r["id"]: (r["reason"], r["detail"]) for r in lost}


def test_of_equal_documents_the_first_stays_and_is_named(tmp_path):
    rng = random.Random(0)
    texts = [" ".join(words(rng, 30)) for _ in range(100)]
    order = [*range(100), *(rng.randrange(100) for _ in range(100))]
    survivors, lost = clean(tmp_path, [texts[k] for k in order], Duplicates())
    first = {k: order.index(k) for k in set(order)}
    assert list(survivors) == [f"d{i}" for i, k in enumerate(order) if first[k] == i]
    assert lost == {f"d{i}": ("duplicate", f"of d{first[k]}") for i, k in enumerate(order) if first[k] != i}


def test_equal_words(tmp_path):
    survivors, lost = clean(tmp_path, ["One, two three.", "one  TWO three", "one two four"], Duplicates(equal="words"))
    assert list(survivors) == ["d0", "d2"] and lost == {"d1": ("duplicate", "of d0")}


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_repeated_parts_are_cut(tmp_path, unit):
    gap = "\n" if unit == "line" else "\n\n"
    header, rng = "This is the header of every page on this site, again.", random.Random(1)
    bodies = [" ".join(words(rng, 20)) for _ in range(40)]
    survivors, lost = clean(tmp_path, [header + gap + b for b in bodies] + [header], Duplicates(unit=unit))
    assert survivors["d0"] == header + gap + bodies[0]
    assert [survivors[f"d{i}"].strip() for i in range(1, 40)] == bodies[1:]
    assert lost == {"d40": (f"all_{unit}s_duplicate", "the first one of d0")}


def test_spans_equal_brute_force(tmp_path):
    rng, size = random.Random(2), 8
    texts = []
    for _ in range(60):
        text = words(rng, 40)
        if texts and rng.random() < 0.6:
            other = rng.choice(texts)
            begin, length = rng.randrange(20), rng.randrange(5, 20)
            at = rng.randrange(40)
            text[at:at] = other[begin : begin + length]
        texts.append(text)
    survivors, _ = clean(tmp_path, [" ".join(t) for t in texts], Duplicates(unit="span", words=size))
    seen: set[tuple[str, ...]] = set()
    for i, text in enumerate(texts):
        covered = set()
        for k in range(len(text) - size + 1):
            gram = tuple(text[k : k + size])
            if gram in seen:
                covered |= set(range(k, k + size))
            seen.add(gram)
        left = [w for k, w in enumerate(text) if k not in covered]
        assert survivors.get(f"d{i}", "").split() == left, i
    assert sum(map(len, texts)) > sum(len(t.split()) for t in survivors.values())


def test_results_do_not_depend_on_memory_or_shards(tmp_path):
    rng = random.Random(3)
    texts = [" ".join(words(rng, 60)) for _ in range(150)]
    texts += [" ".join([*t.split()[:50], *words(rng, 10)]) for t in texts[:60]] + texts[:20]
    steps = (Duplicates(), NearDuplicates(bands=20, rows=3), Duplicates(unit="span", words=10))
    results = []
    for k, (split, memory) in enumerate([(1 << 30, 1 << 30), (2000, 1 << 20), (7000, 1 << 20)]):
        (tmp_path / str(k)).mkdir()
        results.append(clean(tmp_path / str(k), texts, *steps, split=split, memory=memory))
    assert results[0] == results[1] == results[2] and 150 <= len(results[0][0]) < 200


def similar(rng: random.Random, shingles: int, similarity: float) -> tuple[list[int], list[int], float]:
    """Two sets of numbers and their exact Jaccard similarity."""
    shared = round(2 * shingles * similarity / (1 + similarity))
    numbers = rng.sample(range(10**9), 2 * shingles - shared)
    a, b = numbers[:shingles], numbers[:shared] + numbers[shingles:]
    return a, b, shared / (2 * shingles - shared)


def test_collisions_of_minhash_follow_the_law():
    """Pairs of documents of single words with known similarity: the fraction of pairs that share a band is
    1 - (1 - s^rows)^bands, and the fraction of equal minima is s."""
    rng, pairs, bands, rows = random.Random(4), 1500, 14, 8
    a, b = multipliers(bands * rows, 1)
    for target in (0.3, 0.5, 0.7, 0.8, 0.9):
        texts, exact = [], 0.0
        for _ in range(pairs):
            x, y, exact = similar(rng, 60, target)
            texts += [" ".join(map(str, x)), " ".join(map(str, y))]
        n, offsets, data = native.text_arguments(pa.array(texts))
        signatures = np.empty((n, bands * rows), np.uint64)
        native.call("signatures", n, offsets, data, 1, bands * rows, a, b, signatures)
        same = signatures[::2] == signatures[1::2]
        assert abs(same.mean() - exact) < 4 * np.sqrt(exact * (1 - exact) / pairs / 20), (exact, same.mean())
        keys, shingles = np.empty((n, bands), np.uint64), np.empty(n, np.uint32)
        native.call("minhash", n, offsets, data, 1, bands, rows, a, b, keys, shingles)
        hit = (keys[::2] == keys[1::2]).any(1)
        assert (hit == same.reshape(-1, bands, rows).all(2).any(1)).all()
        law = 1 - (1 - exact**rows) ** bands
        assert abs(hit.mean() - law) < 4 * np.sqrt(law * (1 - law) / pairs) + 1e-3, (exact, hit.mean(), law)


def test_sets_of_near_duplicates_keep_their_first(tmp_path):
    """A chain: each is near the next one, the ends are not near each other."""
    rng = random.Random(5)
    base = words(rng, 200)
    chain = [base[k : k + 120] for k in range(0, 70, 6)]
    texts = [" ".join(words(rng, 100)), *(" ".join(t) for t in chain), " ".join(words(rng, 100))]
    survivors, lost = clean(tmp_path, texts, NearDuplicates(ngram=1, bands=40, rows=4))
    assert list(survivors) == ["d0", "d1", f"d{len(texts) - 1}"]
    assert {detail for _, detail in lost.values()} == {"of d1"}


def test_documents_without_words_are_not_near_each_other(tmp_path):
    survivors, lost = clean(tmp_path, ["...", "!!!", "???"], NearDuplicates())
    assert len(survivors) == 3 and not lost


def test_against_an_older_corpus(tmp_path):
    rng = random.Random(6)
    texts = [" ".join(words(rng, 50)) for _ in range(60)]
    steps = [Duplicates(index=True), NearDuplicates(index=True)]
    (tmp_path / "old").mkdir()
    clean(tmp_path / "old", texts[:40], *steps)
    old = (str(tmp_path / "old/out"),)
    (tmp_path / "new").mkdir()
    near = [" ".join([*texts[5].split()[:-1], "changed"])]
    new = [Duplicates(against=old), NearDuplicates(against=old)]
    survivors, lost = clean(tmp_path / "new", [*texts[30:], *near], *new)
    assert list(survivors) == [f"d{i}" for i in range(10, 30)]
    assert lost == {f"d{i}": ("duplicate", f"of d{30 + i}") for i in range(10)} | {"d30": ("near_duplicate", "of d5")}
    with pytest.raises(ValueError, match="was made with other ngram"):
        (tmp_path / "other").mkdir()
        clean(tmp_path / "other", texts, NearDuplicates(ngram=3, against=old))
    with pytest.raises(ValueError, match="has no index"):
        (tmp_path / "third").mkdir()
        clean(tmp_path / "third", texts, Duplicates(against=(str(tmp_path),)))


def test_options_are_checked():
    with pytest.raises(ValueError, match="unit is 'page'"):
        Duplicates(unit="page")
    with pytest.raises(ValueError, match="bands is 0"):
        NearDuplicates(bands=0)


def test_hashes_of_rows_of_a_batch_do_not_depend_on_the_batch():
    batch = batch_of(["alpha beta gamma", "", "one two three four five six", "x"])
    whole = NearDuplicates().sketch(batch, 0)
    parts = [NearDuplicates().sketch(batch.slice(k, 1), k) for k in range(4)]
    assert np.array_equal(whole.hash, np.concatenate([p.hash for p in parts]))
    assert np.array_equal(whole.row, np.concatenate([p.row for p in parts]))


def test_an_index_has_the_documents_that_are_left_at_the_end_and_no_others(tmp_path):
    """Two documents with one id, of which a later step drops one; two indexes of one unit; an index that changed."""
    rows = [{"id": "1", "text": "short"}, {"id": "1", "text": "a text that is long enough"}]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "rules.toml").write_text('[[rule]]\nname = "few"\nfeature = "words"\nmin = 3\n')
    steps = [Duplicates(index=True), Duplicates(equal="words", index=True), Rules((str(tmp_path / "rules.toml"),))]
    Pipeline(steps, [Source(str(tmp_path / "old.jsonl"))], tmp_path / "old").run(workers=0)
    assert len(list((tmp_path / "old/index").iterdir())) == 2

    def new():
        (tmp_path / "new.jsonl").write_text("".join(json.dumps(r | {"id": "n"}) + "\n" for r in rows))
        step = Duplicates(against=(str(tmp_path / "old"),))
        corpus = Pipeline([step], [Source(str(tmp_path / "new.jsonl"))], tmp_path / "new").run(workers=0)
        return [t for p in corpus.files for b in read_documents(p) for t in b.column("text").to_pylist()]

    assert new() == ["short"]
    (tmp_path / "old.jsonl").write_text(json.dumps({"id": "1", "text": "some other text entirely"}) + "\n")
    Pipeline(steps, [Source(str(tmp_path / "old.jsonl"))], tmp_path / "old").run(workers=0)
    assert new() == [r["text"] for r in rows], "the index is part of what a result depends on"


@pytest.mark.parametrize("text", ["ha " * 200, "one two three four five six seven " * 30])
def test_a_run_that_repeats_itself_keeps_its_first_window(tmp_path, text):
    survivors, _ = clean(tmp_path, [text], Duplicates(unit="span", words=50))
    assert survivors["d0"].split() == text.split()[:50]


def test_two_runs_in_one_folder_do_not_disturb_each_other(tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another run is preparing a corpus"):
            clean(tmp_path, ["a"], Duplicates())
