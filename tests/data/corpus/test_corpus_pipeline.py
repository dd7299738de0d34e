"""Pipelines: the same bytes for any number of workers and after any interruption; nothing is lost without a reason."""

from __future__ import annotations

import errno
import json
import random
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from corpus_batches import hang_on_poison, kill_on_poison, write_jsonl

from tutti.data.corpus import CorpusError, Function, Pipeline, Source, files, read_documents
from tutti.data.corpus.accounts import Account
from tutti.data.corpus.pipeline import finished
from tutti.data.corpus.pool import Here, Processes
from tutti.data.corpus.steps import Duplicates, Language, Licence, Lines, Mix, NearDuplicates, Repair, Rules, Words
from tutti.whole_files import UNFINISHED


@pytest.fixture
def raw(tmp_path) -> Path:
    """Documents of two domains with repeats, and files with faults."""
    rng = random.Random(0)
    folder = tmp_path / "raw"
    folder.mkdir()
    sentences = [" ".join(f"w{rng.randrange(3000)}" for _ in range(12)).capitalize() + "." for _ in range(400)]
    texts = [" ".join(rng.sample(sentences, 8)) for _ in range(150)]
    write_jsonl(folder / "a.jsonl", texts + texts[:30])
    write_jsonl(folder / "b.jsonl", [t.replace("w1", "w2") for t in texts[:40]], 1000)
    (folder / "c.jsonl").write_text('{"text": "broken"\n')
    (folder / "empty.jsonl").write_text("")
    return folder


STEPS = (Repair(), Duplicates(), NearDuplicates(ngram=1, bands=8, rows=8), Duplicates(unit="line", least=5))


def content(folder: Path) -> dict[str, bytes]:
    """All files of a result."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
            and p.name not in ("report.html", "report.json")}  # fmt: skip


def pipeline(raw: Path, out: Path, steps=STEPS, **options) -> Pipeline:
    return Pipeline(steps, [Source(str(raw), domain="web")], out, split=8000, **options)


def test_any_number_of_workers_writes_the_same_bytes(raw, tmp_path):
    one = pipeline(raw, tmp_path / "one").run(workers=0)
    two = pipeline(raw, tmp_path / "two").run(workers=2)
    assert one.key == two.key and 100 < one.documents < 190
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert not (tmp_path / "one/work").exists() and finished(tmp_path / "one") is not None


def test_everything_that_comes_in_goes_out_or_has_a_reason(raw, tmp_path):
    corpus = pipeline(raw, tmp_path / "out").run(workers=0)
    accounts = corpus.accounts
    assert [a.step for a in accounts] == ["read", "repair", "duplicate_documents", "near_duplicates", "duplicate_lines"]
    for before, after in pairwise(accounts):
        assert (before.documents_out, before.bytes_out) == (after.documents_in, after.bytes_in)
    for account in accounts:
        account.balance()
    assert accounts[0].documents_in == 221 and accounts[0].dropped == {"malformed_json": [1, 17]}
    assert accounts[2].dropped["duplicate"][0] == 30
    rows = [r for p in (tmp_path / "out/dropped").iterdir() for r in pq.read_table(p).to_pylist()]
    assert len(rows) + corpus.documents == 221 and all(r["reason"] for r in rows)
    ids = {i for p in corpus.files for b in read_documents(p, ["id"]) for i in b.column("id").to_pylist()}
    assert ids | {r["id"] for r in rows} >= {f"d{i}" for i in range(180)}
    text = (tmp_path / "out/report.html").read_text()
    assert "duplicate_documents" in text and "malformed_json" in text and "<script" not in text


def test_text_of_documents_is_escaped_in_reports(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["<script>alert(1)</script>"] * 2)
    Pipeline([Duplicates()], [Source(str(tmp_path / "a.jsonl"))], tmp_path / "out").run(workers=0)
    assert "<script" not in (tmp_path / "out/report.html").read_text()


def test_a_run_goes_on_where_it_was_interrupted(raw, tmp_path, monkeypatch):
    whole = pipeline(raw, tmp_path / "whole").run(workers=0)

    class Interrupted(Here):
        def __init__(self, tasks: int):
            self.left, self.done = tasks, 0

        def run(self, tasks, progress=lambda *_: None):
            for task in tasks:
                if task.done() is None:
                    if self.left == 0:
                        raise KeyboardInterrupt
                    self.left -= 1
                    self.done += 1
                    task.run(_context())
            return []

    total, at = 0, 1
    while True:
        pool = Interrupted(at)
        try:
            corpus = pipeline(raw, tmp_path / "parts").run(pool=pool)
            break
        except KeyboardInterrupt:
            total += pool.done
            at = at % 5 + 1
    total += pool.done
    assert corpus.key == whole.key and content(tmp_path / "parts") == content(tmp_path / "whole")
    again = pipeline(raw, tmp_path / "parts").run(pool=Interrupted(0))
    assert again.key == whole.key, "a finished corpus is not made again"
    shards = len(whole.files)
    assert total == 4 * shards + 4 + 3 + 3 + 1 + 1, "no task was done twice"


def _context():
    from tutti.data.corpus.shard import Context

    return Context()


def test_other_later_steps_use_the_segments_before_again(raw, tmp_path):
    pipeline(raw, tmp_path / "out", keep_work=True).run(workers=0)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/work").glob("0-*/*.arrows")}
    pipeline(raw, tmp_path / "out", steps=(*STEPS, Rules(("gopher_quality",))), keep_work=True).run(workers=0)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out/work").glob("0-*/*.arrows")}
    write_jsonl(raw / "b.jsonl", ["other text"])
    pipeline(raw, tmp_path / "out", keep_work=True).run(workers=0)
    assert len(list((tmp_path / "out/work").glob("0-*"))) == 2, "another input is another segment"


def test_segments_are_removed_when_the_next_one_is_whole(raw, tmp_path):
    """What is on disk at a time is two segments, however many steps need all documents."""
    most: list[int] = []

    class Watching(Here):
        def run(self, tasks, progress=lambda *_: None):
            failures = super().run(tasks)
            most.append(len({p.parent for p in (tmp_path / "out/work").rglob("*.arrows")}))
            return failures

    pipeline(raw, tmp_path / "out", steps=(*STEPS, Duplicates(unit="span"))).run(pool=Watching())
    assert max(most) == 2


def test_a_full_disk_leaves_no_file_that_looks_complete(raw, tmp_path, monkeypatch):
    """datatrove marks such a task as completed, and its file breaks the next stage."""
    whole = pipeline(raw, tmp_path / "whole").run(workers=0)
    real, room = files.Checked.write, [20_000]

    def write(self, data):
        room[0] -= memoryview(data).nbytes
        if room[0] < 0 and not self.abandoned:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(files.Checked, "write", write)
    with pytest.raises(CorpusError, match="No space left on device"):
        pipeline(raw, tmp_path / "out").run(workers=0)
    assert not list((tmp_path / "out").rglob(f"*{UNFINISHED}")) and finished(tmp_path / "out") is None
    room[0] = 1 << 40
    assert pipeline(raw, tmp_path / "out").run(workers=0).key == whole.key


def test_a_file_that_was_damaged_is_made_again(raw, tmp_path):
    whole = pipeline(raw, tmp_path / "out", keep_work=True).run(workers=0)
    damaged = sorted((tmp_path / "out/work").glob("1-*/*.arrows"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-10])
    (tmp_path / "out/manifest.json").unlink()
    assert pipeline(raw, tmp_path / "out", keep_work=True).run(workers=0).key == whole.key


@pytest.mark.parametrize("function", [kill_on_poison, hang_on_poison])
def test_a_document_that_ends_its_process_or_hangs_is_left_out_alone(tmp_path, function):
    texts = [f"document number {i} is fine" for i in range(30)]
    texts[11] = "poison one"
    texts[17] = "poison two"
    write_jsonl(tmp_path / "a.jsonl", texts)
    source = [Source(str(tmp_path / "a.jsonl"))]
    with closing(Processes(2, stall=1.0)) as pool:
        corpus = Pipeline([Function(function), Duplicates()], source, tmp_path / "out", split=600).run(pool=pool)
    assert corpus.documents == 28
    account = next(a for a in corpus.accounts if a.step == function.__name__)
    assert account.dropped["crashed"][0] == 2
    assert {s["id"] for s in account.samples["crashed"]} == {"d11", "d17"}
    clean = Pipeline([Duplicates()], source, tmp_path / "clean", split=600).run(workers=0)
    rows = [[r for p in c.files for b in read_documents(p) for r in b.to_pylist()] for c in (corpus, clean)]
    assert rows[0] == [r for r in rows[1] if "poison" not in r["text"]]


def test_an_error_in_a_step_names_the_shard(raw, tmp_path):
    def fails(batch):
        raise RuntimeError("of my own")

    with pytest.raises(CorpusError, match=r"shard 0 of \d+ \(a\.jsonl, bytes 0 to 8000\): RuntimeError: of my own"):
        pipeline(raw, tmp_path / "out", steps=(Function(fails),)).run(workers=0)


def test_a_step_may_not_lose_documents(raw, tmp_path):
    with pytest.raises(CorpusError, match=r"documents went in and .* came out; give reasons"):
        pipeline(raw, tmp_path / "out", steps=(Function(_first_only),)).run(workers=0)


def _first_only(batch):
    return batch.slice(0, 1)


def test_a_mixture(tmp_path):
    rng = random.Random(0)
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [" ".join(str(rng.random()) for _ in range(20)) for _ in range(400)])
    sources = [Source(str(tmp_path / f"{n}.jsonl"), domain=n) for n in "ab"]
    steps = [Mix({"a": 3, "b": 1}), Duplicates()]
    corpus = Pipeline(steps, sources, tmp_path / "out", split=20_000).run(workers=0)
    domains = json.loads((tmp_path / "out/report.json").read_text())["domains"]
    assert domains["a"] / domains["b"] == pytest.approx(3, rel=0.15)
    assert corpus.accounts[1].dropped["not_sampled"][0] == 800 - corpus.documents


def test_another_mixture_uses_the_documents_before_it_again(raw, tmp_path):
    steps = (Repair(), Mix({"web": 1}))
    first = pipeline(raw, tmp_path / "out", steps, keep_work=True).run(workers=0)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/work").glob("0-*/*.arrows")}
    smaller = pipeline(raw, tmp_path / "out", (Repair(), Mix({"web": 1}, size=20_000)), keep_work=True)
    assert smaller.replaces and not pipeline(raw, tmp_path / "out", steps, keep_work=True).replaces
    assert smaller.run(workers=0).documents < first.documents and not smaller.replaces
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out/work").glob("0-*/*.arrows")}


def test_json_lines_as_the_result(raw, tmp_path):
    corpus = pipeline(raw, tmp_path / "out", format="jsonl").run(workers=0)
    rows = [r for p in corpus.files for b in read_documents(p, ["id", "text"]) for r in b.to_pylist()]
    other = pipeline(raw, tmp_path / "other").run(workers=0)
    assert rows == [r for p in other.files for b in read_documents(p, ["id", "text"]) for r in b.to_pylist()]
    again = Pipeline([Duplicates()], [Source(str(tmp_path / "out/documents"))], tmp_path / "again").run(workers=0)
    assert again.documents == corpus.documents


def test_steps_of_one_kind_have_names_of_their_own(raw, tmp_path):
    steps = (
        Rules(("gopher_quality",)),
        Lines(punctuation=False, sentences=1),
        Rules(("fineweb",)),
        Language(score=0.0),
    )
    corpus = pipeline(raw, tmp_path / "out", steps=steps).run(workers=0)
    assert [a.step for a in corpus.accounts] == ["read", "rules", "lines", "rules 2", "language"]


def test_accounts_add_up():
    a, b = Account("x", 3, 30, 2, 20, {"r": [1, 10]}), Account("x", 1, 5, 0, 0, {"r": [1, 5]})
    a.merge(b)
    assert (a.documents_in, a.bytes_in, a.documents_out, a.dropped) == (4, 35, 2, {"r": [2, 15]})
    a.documents_in += 1
    with pytest.raises(AssertionError):
        a.balance()


def test_what_a_pipeline_refuses(tmp_path):
    with pytest.raises(ValueError, match="at least one source"):
        Pipeline([])
    with pytest.raises(ValueError, match="is not a step; wrap a function as Function"):
        Pipeline([print], [Source("x")])  # pyright: ignore
    with pytest.raises(ValueError, match="format is 'csv'"):
        Pipeline([], [Source("x")], format="csv")
    with pytest.raises(ValueError, match="there is no file none"):
        Words(("none.txt",))
    with pytest.raises(ValueError, match="workers is -1; give 1 or more, or 0 to work in this process"):
        Processes(-1)
    with pytest.raises(ValueError, match="source x: no encoding 'utf8x'"):
        Source("x", encoding="utf8x")
    with pytest.raises(ValueError, match="keep has 'english'; give ISO 639 codes"):
        Language(keep=("en", "english"))


def test_batches_of_which_nothing_is_left(tmp_path):
    """4,096 documents fill a batch; the steps after the rules have no documents for it."""
    long = (
        "This is a document with all the words that the rules of Gopher want to see in it, and that have meaning. " * 4
    )
    texts = ["short"] * 4096 + [f"{long} {i}" for i in range(5)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    steps = [Rules(("gopher_quality",)), Language(score=0.0), Licence(), Duplicates()]
    source = [Source(str(tmp_path / "a.jsonl"))]
    corpus = Pipeline(steps, source, tmp_path / "out").run(workers=0)
    columns = pq.read_schema(corpus.files[0]).names
    assert corpus.documents == 5 and {"language", "language_score", "licence"} <= set(columns)
    nothing = Pipeline([Words((str(write(tmp_path / "w.txt", "words\nshort")),)), *steps], source, tmp_path / "none")
    corpus = nothing.run(workers=0)
    assert corpus.documents == 0 and pq.read_schema(corpus.files[0]).names == columns


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_document_that_ends_its_process_may_share_its_id(tmp_path):
    rows = [{"id": f"same\u2028{i % 2}", "text": "poison" if i == 3 else f"text {i}"} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    source = [Source(str(tmp_path / "a.jsonl"))]
    corpus = Pipeline([Function(kill_on_poison), Licence()], source, tmp_path / "out").run(workers=1)
    texts = [t for p in corpus.files for b in read_documents(p) for t in b.column("text").to_pylist()]
    assert texts == [f"text {i}" for i in range(6) if i != 3]


def test_a_step_that_changes_the_type_of_text_is_refused(raw, tmp_path):
    with pytest.raises(CorpusError, match="_as_large: text has type large_string"):
        pipeline(raw, tmp_path / "out", steps=(Function(_as_large), Rules())).run(workers=0)


def _as_large(batch):
    import pyarrow as pa

    return batch.set_column(1, "text", batch.column("text").cast(pa.large_string()))


def test_a_result_that_was_being_replaced_is_made_again(tmp_path, monkeypatch):
    from tutti.data.corpus import finish

    source = [Source(str(write_jsonl(tmp_path / "a.jsonl", ["one", "two"])))]
    first = Pipeline([Licence()], source, tmp_path / "out").run(workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(finish, "write_report", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            Pipeline([Function(_upper)], source, tmp_path / "out").run(workers=0)
    again = Pipeline([Licence()], source, tmp_path / "out").run(workers=0)
    assert again.key == first.key
    assert [t for p in again.files for b in read_documents(p) for t in b.column("text").to_pylist()] == ["one", "two"]


def _interrupted(*args):
    raise KeyboardInterrupt


def _upper(batch):
    import pyarrow.compute as pc

    return batch.set_column(1, "text", pc.utf8_upper(batch.column("text")))


def test_a_step_called_read_has_an_account_of_its_own(tmp_path):
    source = [Source(str(write_jsonl(tmp_path / "a.jsonl", ["one", "two"])))]
    corpus = Pipeline([Function(read)], source, tmp_path / "out").run(workers=0)
    assert [(a.step, a.documents_in) for a in corpus.accounts] == [("read", 2), ("read 2", 2)]


def read(batch):
    return batch


def test_folders_of_others_are_not_replaced(raw, tmp_path):
    (tmp_path / "out/documents").mkdir(parents=True)
    (tmp_path / "out/documents/keep.me").write_text("mine")
    with pytest.raises(ValueError, match="was not written by a preparation of a corpus"):
        pipeline(raw, tmp_path / "out").run(workers=0)
    assert (tmp_path / "out/documents/keep.me").read_text() == "mine"


def test_weights_of_domains_that_no_source_has(tmp_path):
    with pytest.raises(ValueError, match="no source has the domain wep; there are books, web"):
        Pipeline([Mix({"wep": 1, "books": 1})], [Source("x", domain="web"), Source("y", domain="books")])
