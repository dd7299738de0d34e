"""The stream of samples is a function of the seed: for any number of parts, after any interruption."""

import gzip
import json
import multiprocessing
from itertools import islice

import pytest
import torch

from tutti.data import BadRow, Mixture, Stream, open_source
from tutti.data.sources.source import MappedStream, Regrouped, StreamingSource


class Shards(StreamingSource):
    """Shards of given sizes; counts the rows that were read."""

    def __init__(self, name, sizes, bad=()):
        self.label, self.sizes, self.bad, self.shards, self.read = name, sizes, bad, len(sizes), 0

    def open(self, shard, start):
        for i in range(start, self.sizes[shard]):
            self.read += 1
            name = f"{self.label}{shard}.{i}"
            yield BadRow(f"{name}: bad") if (shard, i) in self.bad else {"x": name}


def rows(name, n):
    return [{"x": f"{name}{i}"} for i in range(n)]


def mixture():
    """Two streaming sources and one with random access, whose epochs end at different samples."""
    return Mixture([(Shards("s", [5, 0, 9, 4]), 0.5), (rows("m", 13), 0.3), (Shards("t", [7]), 0.2)])


def taken(stream, count):
    return [[(row["sample_index"], row["x"]) for row in next(stream)] for _ in range(count)]


def whole(source, batch, count, **options):
    with Stream(source, batch, seed=7, window=6, **options) as stream:
        return taken(stream, count)


@pytest.mark.parametrize("make", (mixture, lambda: Shards("s", [5, 0, 9, 4]), lambda: rows("m", 13)))
@pytest.mark.parametrize("ahead", (0, 1))
def test_two_parts_then_three_continue_the_stream(make, ahead):
    expected = [row for batch in whole(make(), 12, 20) for row in batch]
    parts = [Stream(make(), 12, 7, p, 2, window=6, ahead=ahead) for p in range(2)]
    got = [[taken(stream, 1)[0] for stream in parts] for _ in range(7)]
    states = [json.loads(json.dumps(stream.state_dict())) for stream in parts]
    assert states[0] == states[1] and states[0]["samples"] == 84
    for stream in parts:
        stream.close()  # what was read ahead is lost
    three = [Stream(make(), 12, 7, p, 3, window=6, ahead=ahead) for p in range(3)]
    for stream in three:
        stream.load_state_dict(states[0])
    got += [[taken(stream, 1)[0] for stream in three] for _ in range(13)]
    assert [len(part) for part in got[0]] == [6, 6] and [len(part) for part in got[-1]] == [4, 4, 4]
    assert [row for batch in got for part in batch for row in part] == expected
    for stream in three:
        stream.close()


def test_each_epoch_has_every_row_once():
    for source in (Shards("s", [5, 0, 9, 4]), rows("m", 18)):
        flat = [x for batch in whole(source, 6, 9) for _, x in batch]
        epochs = [flat[e * 18 : e * 18 + 18] for e in range(3)]
        assert all(len(set(epoch)) == 18 for epoch in epochs)
        assert epochs[0] != epochs[1] and set(epochs[0]) == set(epochs[1])


def test_sources_of_a_mixture_have_epochs_of_their_own():
    flat = [x for batch in whole(mixture(), 10, 30) for _, x in batch]
    m = [x for x in flat if x.startswith("m")]
    assert len(set(m[:13])) == len(set(m[13:26])) == 13 and len(m) > 60
    assert len(set([x for x in flat if x.startswith("s")][:18])) == 18


def test_a_resumed_stream_reads_a_streaming_source_from_its_window():
    source = Shards("s", [1000])
    stream = Stream(source, 10, window=20, ahead=0)
    taken(stream, 47)
    again = Shards("s", [1000])
    resumed = Stream(again, 10, window=20, ahead=0)
    resumed.load_state_dict(stream.state_dict())
    taken(resumed, 1)
    assert again.read == 20 + 4, "a window, and what the digest of the source reads"


def test_a_part_reads_only_its_rows():
    seen = []

    class Seen(list):
        def __getitem__(self, i):
            seen.append(i)
            return super().__getitem__(i)

    stream = Stream(Seen(rows("m", 100)), 20, part=1, parts=4, ahead=0)
    seen.clear()
    taken(stream, 3)
    assert len(seen) == 15


def test_without_shuffling_the_order_is_that_of_the_source():
    assert whole(rows("m", 4), 3, 2, shuffle=None) == [[(0, "m0"), (1, "m1"), (2, "m2")],
                                                       [(3, "m3"), (4, "m0"), (5, "m1")]]  # fmt: skip
    flat = [x for batch in whole(Shards("s", [2, 3]), 5, 1, shuffle=None) for _, x in batch]
    assert flat == ["s0.0", "s0.1", "s1.0", "s1.1", "s1.2"]


@pytest.mark.parametrize("make", (lambda: rows("m", 7), lambda: Shards("s", [3, 4])))
def test_epochs_end_with_a_smaller_batch(make):
    with Stream(make(), 4, epochs=2) as stream:
        sizes = [len(batch) for batch in stream]
    assert sizes == [4, 4, 4, 2] and stream.samples == 14


def test_a_length_is_known_for_epochs_of_rows_by_index():
    assert len(Stream(rows("m", 7), 4, epochs=2)) == 4
    for stream in (Stream(rows("m", 7), 4), Stream(Shards("s", [3]), 4, epochs=1)):
        with pytest.raises(TypeError, match="has no length"):
            len(stream)


def test_a_bad_row_stops_the_stream_or_is_counted():
    source = Shards("s", [4, 4], bad={(1, 2)})
    with pytest.raises(BadRow, match=r"s1\.2: bad"):
        whole(source, 4, 3)
    with Stream(source, 7, on_bad="skip", window=6) as stream:
        assert len({x for _, x in taken(stream, 1)[0]}) == 7
        assert stream.bad_rows >= 1 and stream.bad[0] == "s1.2: bad"


@pytest.mark.parametrize("options", [{}, {"ahead": 0}, {"workers": 1}])
def test_bad_rows_after_the_last_batch_are_counted(options):
    source = Shards("s", [4], bad={(0, 2), (0, 3)})
    with Stream(source, 1, shuffle=None, epochs=1, on_bad="skip", **options) as stream:
        assert [row["x"] for batch in stream for row in batch] == ["s0.0", "s0.1"]
        assert stream.bad == ["s0.2: bad", "s0.3: bad"] and stream.bad_rows == 2
    with pytest.raises(BadRow, match=r"s0\.2: bad"):
        list(Stream(source, 1, shuffle=None, epochs=1, **options))


def no_threes(row):
    if row["x"] == "m3":
        raise RuntimeError("three")
    return row


def test_a_row_that_cannot_be_transformed_is_replaced_by_the_next_one():
    with pytest.raises(BadRow, match=r"row 3: RuntimeError: three; correct the row, or read with on_bad='skip'"):
        whole(rows("m", 6), 6, 1, shuffle=None, transform=no_threes)
    with Stream(rows("m", 6), 6, shuffle=None, transform=no_threes, on_bad="skip") as stream:
        assert [x for _, x in taken(stream, 1)[0]] == ["m0", "m1", "m2", "m4", "m4", "m5"]
        assert stream.bad_rows == 1
    two = [Stream(Shards("m", [6]), 6, 0, p, 2, transform=no_zero, on_bad="skip") for p in range(2)]
    one = Stream(Shards("m", [6]), 6, 0, transform=no_zero, on_bad="skip")
    assert [row for stream in two for row in taken(stream, 1)[0]] == taken(one, 1)[0]
    for stream in (*two, one):
        stream.close()


def no_zero(row):
    if row["x"] == "m0.0":
        raise RuntimeError("zero")
    return row


def test_all_rows_bad_is_an_error():
    with pytest.raises(ValueError, match="no rows that can be read"):
        whole(Shards("s", [2], bad={(0, 0), (0, 1)}), 2, 1, on_bad="skip")
    with pytest.raises(ValueError, match=r"1 rows were tried in place of one, and all are bad; the last: row 0"):
        whole([{"x": "m3"}], 1, 1, transform=no_threes, on_bad="skip")


def collated(features):
    return {"x": torch.tensor([int(f["x"][1:]) for f in features])}


@pytest.mark.starts
def test_workers_and_a_thread_give_the_same(tmp_path):
    lines = "\n".join(json.dumps(row) for row in rows("m", 40))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    runs = []
    for workers in (0, 2):
        source = Mixture({str(tmp_path / "a.jsonl"): 1, str(tmp_path / "b.jsonl.gz"): 1})
        with Stream(source, 8, workers=workers, collate=collated) as stream:
            runs.append([next(stream)["x"].tolist() for _ in range(12)])
    assert runs[0] == runs[1]


def test_a_state_is_of_one_seed():
    state = Stream(rows("m", 3), 1, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed 1, this one has 0"):
        Stream(rows("m", 3), 1).load_state_dict(state)


def test_a_state_is_of_its_sources():
    state = Stream(Mixture([(rows("m", 3), 3), (Shards("s", [5, 6]), 1)]), 1).state_dict()
    for other in ([(rows("m", 4), 3), (Shards("s", [5, 6]), 1)], [(rows("m", 3), 1), (Shards("s", [5, 6]), 1)]):
        with pytest.raises(ValueError, match=r"over other sources: \[\[3, 7500\], \[2, 2500\]\]"):
            Stream(Mixture(other), 1).load_state_dict(state)


def test_more_parts_than_rows_are_an_error():
    with pytest.raises(ValueError, match="a batch of 2 has no rows for some of 3 parts"):
        Stream(rows("m", 3), 2, parts=3)


def test_blocks_of_a_parquet_file_are_read_once(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"x": list(range(200))}), tmp_path / "a.parquet", row_group_size=10)
    source, read = open_source(tmp_path / "a.parquet"), []
    inner = source._open().read_row_group

    class File:
        def read_row_group(self, group, columns):
            read.append(group)
            return inner(group, columns=columns)

    source._file = File()
    with Stream(source, 10, shuffle="blocks", ahead=0) as stream:
        flat = [row["x"] for _ in range(20) for row in next(stream)]
    assert sorted(flat) == list(range(200)) and sorted(read) == list(range(20))


def _write(folder, part, parts, batches, source, state):
    """A reader in a process: writes the samples of each batch to a file, and then its state to another."""
    with Stream(_of_files(source), 12, 3, part, parts, window=20) as stream:
        if state is not None:
            stream.load_state_dict(state)
        while batches is None or stream.samples < batches * 12:
            got = [[row["sample_index"], row["x"]] for row in next(stream)]
            scratch = folder / f"scratch-{part}"
            scratch.write_text(json.dumps(got))
            scratch.rename(folder / f"{stream.samples}-{part}-of-{parts}")
            if part == 0:
                scratch.write_text(json.dumps(stream.state_dict()))
                scratch.rename(folder / "states" / f"{stream.samples}.json")


def _of_files(folder):
    return Mixture({str(folder / "*.jsonl.gz"): 0.6, str(folder / "b.jsonl"): 0.4})


@pytest.mark.starts
def test_processes_that_are_killed_and_others_that_go_on(tmp_path):
    """Two readers of a streaming, weighted mixture are killed in the middle of an epoch; three go on."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir(), (out / "states").mkdir(parents=True)
    for name in ("a", "c", "d"):
        with gzip.open(data / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(json.dumps(row) for row in rows(name, 300)))
    (data / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows("b", 500)))
    context = multiprocessing.get_context("fork")

    def start(parts, batches, state=None):
        processes = [context.Process(target=_write, args=(out, p, parts, batches, data, state)) for p in range(parts)]
        for process in processes:
            process.start()
        return processes

    two = start(2, None)
    while sum(1 for _ in (out / "states").iterdir()) < 5:
        assert all(process.is_alive() for process in two)
        two[0].join(0.01)
    for process in two:
        process.kill()
        process.join()
    newest = max(int(p.stem) for p in (out / "states").iterdir())
    last = newest // 12 + 6
    for process in start(3, last, json.loads((out / "states" / f"{newest}.json").read_text())):
        process.join()
        assert process.exitcode == 0
    with Stream(_of_files(data), 12, 3, window=20) as stream:
        for k in range(1, last + 1):
            parts = 2 if 12 * k <= newest else 3
            files = [out / f"{12 * k}-{p}-of-{parts}" for p in range(parts)]
            got = [row for file in files if file.exists() for row in json.loads(file.read_text())]
            expected = [[row["sample_index"], row["x"]] for row in next(stream)]
            if parts == 3 or files[1].exists():  # the second reader may have been behind when it was killed
                assert got == expected
            else:
                assert got == expected[:6]


class Once:
    """A function that counts its rows."""

    def __init__(self):
        self.seen = []

    def __call__(self, row):
        self.seen.append(row["x"])
        return {"y": row["x"], "k": row["sample_index"]}


def test_a_mapped_stream_is_computed_for_the_rows_of_a_part():
    function = Once()
    stream = Stream(MappedStream(Shards("s", [40]), function), 10, part=1, parts=2, ahead=0, window=20)
    got = next(stream)
    assert [row["k"] for row in got] == [row["sample_index"] for row in got] == [5, 6, 7, 8, 9]
    assert function.seen == [row["y"] for row in got]


def pairs(rows):
    """Two rows a group, and the last alone."""
    while group := [row["x"] for row in islice(rows, 2)]:
        yield {"x": "+".join(group)}


def test_regrouped_rows_resume_inside_of_a_shard():
    def source():
        return Regrouped(Shards("s", [5, 4], bad={(0, 1), (1, 0)}), pairs)

    assert list(map(str, source().open(0, 0))) == [
        "s0.1: bad", "{'x': 's0.0+s0.2'}", "{'x': 's0.3+s0.4'}"
    ]  # fmt: skip
    assert list(source().open(0, 2)) == [{"x": "s0.3+s0.4"}]
    expected = whole(source(), 2, 8, on_bad="skip")
    first = Stream(source(), 2, 7, window=6, on_bad="skip")
    got = taken(first, 3)
    second = Stream(source(), 2, 7, window=6, on_bad="skip")
    second.load_state_dict(first.state_dict())
    assert got + taken(second, 5) == expected
    first.close(), second.close()


def test_each_window_of_each_epoch_has_an_order_of_its_own():
    size, windows = 16, 4
    source = Shards("s", [size * windows])
    with Stream(source, size, seed=7, window=size, epochs=3) as stream:
        orders = [[int(row["x"].partition(".")[2]) for row in batch] for batch in stream]
    assert [sorted(order) for order in orders] == [
        list(range(i % windows * size, i % windows * size + size)) for i in range(3 * windows)
    ], "rows are shuffled within their window"
    relative = [tuple(x % size for x in order) for order in orders]
    assert len(set(relative)) == len(relative), "no two windows have one order"
    with Stream(source, size, seed=8, window=size) as other:
        assert [int(row["x"].partition(".")[2]) for row in next(other)] != orders[0], "the order depends on the seed"
