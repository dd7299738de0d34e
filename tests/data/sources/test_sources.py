"""Each format gives the rows that were written, by index, after pickling, and names bad rows."""

import gzip
import io
import json
import pickle
import tarfile
import wave

import numpy as np
import pytest
from PIL import Image

from tutti.data import BadRow, open_source
from tutti.data.sources import index

ROWS = [{"text": f"row {i}", "label": i} for i in range(7)]


def jsonl(folder):
    lines = [json.dumps(row) for row in ROWS]
    (folder / "a.jsonl").write_text("\n".join([*lines[:3], "", *lines[3:]]) + "\n")
    return folder / "a.jsonl", {}


def parquet(folder):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=3)
    return folder / "a.parquet", {}


def csv(folder):
    (folder / "a.csv").write_text("text,label\r\n" + "\r\n".join(f'"row {i}",{i}' for i in range(7)))
    return folder / "a.csv", {"types": {"label": int}}


def tsv(folder):
    (folder / "a.tsv").write_text("text\tlabel\n" + "".join(f"row {i}\t{i}\n" for i in range(7)))
    return folder / "a.tsv", {"types": {"label": int}}


def saved(folder):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved", {}


@pytest.mark.parametrize("write", (jsonl, parquet, csv, tsv, saved))
def test_rows_are_those_that_were_written(write, tmp_path):
    path, options = write(tmp_path)
    source = open_source(path, **options)
    assert len(source) == 7 and source.columns == ["text", "label"]
    assert [source[i] for i in (5, 0, -1)] == [ROWS[5], ROWS[0], ROWS[6]]
    assert list(pickle.loads(pickle.dumps(source))) == ROWS
    with pytest.raises(IndexError, match="row 7 of 7"):
        source[7]


def test_a_dataset_and_a_list():
    import datasets

    for spec in (datasets.Dataset.from_list(ROWS), ROWS):
        assert list(open_source(spec)) == ROWS
    stream = open_source(datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3))
    assert stream.shards == 3
    assert [row for shard in range(3) for row in stream.open(shard, 0)] == ROWS
    assert list(stream.open(1, 1)) == list(stream.open(1, 0))[1:]


def test_compressed_lines_are_streamed(tmp_path):
    for name, part in (("a", ROWS[:4]), ("b", ROWS[4:])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(json.dumps(row) for row in part) + "\nnot json\n")
    source = open_source(str(tmp_path / "*.jsonl.gz"))
    assert source.shards == 2 and list(source.open(1, 1))[:-1] == ROWS[5:]
    assert "b.jsonl.gz:4: not JSON" in str(next(iter(source.open(1, 3))))


def test_lines_of_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\n  two\nthr\xc3\xa9e")
    source = open_source(tmp_path / "a.txt")
    assert [row["text"] for row in source] == ["one", "  two", "thr\u00e9e"]
    assert source.name(1).endswith("a.txt:3")


def test_files_of_text(tmp_path):
    for name, text in (("a", "one\ntwo\n"), ("b", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    source = open_source(tmp_path, rows="files")
    assert [row["text"] for row in source] == ["one\ntwo\n", ""] and source[1]["path"].endswith("b.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(BadRow, match=r"b\.txt: 'utf-8' codec .* give the encoding"):
        source[1]
    with pytest.raises(ValueError, match="rows is 'words'; a row of text is one of its 'lines' or"):
        open_source(tmp_path, rows="words")


def test_csv_values_may_span_lines(tmp_path):
    (tmp_path / "a.csv").write_text('x,y\n1,"a\nb, ""c"""\n\n2,d\n')
    source = open_source(tmp_path / "a.csv")
    assert list(source) == [{"x": "1", "y": 'a\nb, "c"'}, {"x": "2", "y": "d"}]
    assert [source.name(i).rpartition(":")[2] for i in range(2)] == ["2", "5"]


def test_quotes_across_chunks(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("x\n" + "".join(f'"{i}\n{i}"\n' for i in range(50)))
    monkeypatch.setattr(index, "CHUNK", 5)
    assert [row["x"] for row in open_source(tmp_path / "a.csv")] == [f"{i}\n{i}" for i in range(50)]


def test_a_bad_row_is_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": \n[1]\n')
    source = open_source(tmp_path / "a.jsonl")
    with pytest.raises(BadRow, match=r"a\.jsonl:3: not JSON .* or read with on_bad='skip'"):
        source[1]
    with pytest.raises(BadRow, match=r"a\.jsonl:4: a list where an object is needed"):
        source[2]
    (tmp_path / "a.csv").write_text("x,y\n1,2\n1,2,3\na,b\n")
    source = open_source(tmp_path / "a.csv", types={"x": int})
    with pytest.raises(BadRow, match=r"a\.csv:3: 3 values for 2 columns \(x, y\)"):
        source[1]
    with pytest.raises(BadRow, match=r"a\.csv:4: x is 'a', not int"):
        source[2]


def test_an_index_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    path, _ = jsonl(tmp_path)
    assert len(open_source(path, cache=tmp_path / "cache")) == 7
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with monkeypatch.context() as m:
        m.setattr("tutti.data.sources.records.records", None)
        assert open_source(path, cache=tmp_path / "cache")[6] == ROWS[6]
    path.write_text('{"x": 1}\n')
    assert list(open_source(path, cache=tmp_path / "cache")) == [{"x": 1}]


def test_an_index_of_a_large_file_is_beside_it(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"x": "y" * 1000}) + "\n" for _ in range(1100)))
    assert len(open_source(tmp_path / "a.jsonl")) == 1100
    assert (tmp_path / ".a.jsonl.lines-index.npz").exists()
    assert len(open_source(tmp_path)) == 1100  # a folder of one format, without the index


def test_several_files_follow_one_another(tmp_path):
    for name, part in (("a", ROWS[:4]), ("b", ROWS[4:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    source = open_source(tmp_path)
    assert list(source) == ROWS and source.name(5).endswith("b.jsonl:2")
    assert list(open_source([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])) == ROWS[4:] + ROWS[:4]


def image(color):
    file = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(file, "png")
    return file.getvalue()


def sound(samples, rate=8000):
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1), wav.setsampwidth(2), wav.setframerate(rate)
        wav.writeframes(np.asarray(samples, np.int16).tobytes())
    return file.getvalue()


def test_members_of_a_tar_file(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for i in range(3):
            for kind, content in (("png", image((i, 0, 0))), ("cls", str(i).encode()), ("json", b'{"a": 1}')):
                member = tarfile.TarInfo(f"train/{i:03}.{kind}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    source = open_source(tmp_path / "a.tar")
    assert len(source) == 3 and source.columns == ["__key__", "png", "cls", "json"]
    row = pickle.loads(pickle.dumps(source))[2]
    assert row["__key__"] == "train/002" and row["cls"] == 2 and row["json"] == {"a": 1}
    assert row["png"].getpixel((0, 0)) == (2, 0, 0)
    assert open_source(tmp_path / "a.tar", decode=False)[1]["cls"] == b"1"
    assert source.name(1).endswith("a.tar:train/001")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # theirs leaves the file open
def test_our_offsets_are_those_of_webdataset(tmp_path):
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "a.tar")) as file:
        for i in range(5):
            file.write({"__key__": f"{i:03}", "txt": f"text {i}", "cls": i})
    source = open_source(tmp_path / "a.tar")
    theirs = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode()
    assert [(r["__key__"], r["txt"], r["cls"]) for r in source] == [(r["__key__"], r["txt"], r["cls"]) for r in theirs]


def test_a_compressed_tar_file_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"not a tar file without compression .*; decompress it first"):
        open_source(tmp_path / "a.tar")


def test_a_folder_of_images(tmp_path):
    for name in ("dog/1.png", "cat/b.png", "cat/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(image((0, 9, 0)))
    source = open_source(tmp_path)
    assert source.classes == ["cat", "dog"] and [row["label"] for row in source] == [0, 0, 1]
    assert source[1]["image"].size == (4, 3) and source[1]["path"].endswith("cat/b.png")
    (tmp_path / "cat" / "b.png").write_bytes(b"no image")
    with pytest.raises(BadRow, match=r"cat/b\.png: not a png file .*; replace it, or read with on_bad='skip'"):
        source[1]


def test_a_folder_with_metadata(tmp_path):
    (tmp_path / "1.png").write_bytes(image((1, 1, 1)))
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "1.png", "text": "grey"}\n')
    row = open_source(tmp_path)[0]
    assert row["text"] == "grey" and "file_name" not in row and "label" not in row


def test_a_folder_of_audio_is_resampled(tmp_path):
    tone = 10_000 * np.sin(2 * np.pi * 200 * np.arange(8000) / 8000)
    (tmp_path / "a.wav").write_bytes(sound(tone))
    audio = open_source(tmp_path)[0]["audio"]
    assert audio["sampling_rate"] == 8000 and audio["array"].shape == (8000,) and audio["array"].dtype == np.float32
    assert np.abs(audio["array"] - tone / 32768).max() < 1e-4
    higher = open_source(tmp_path, sampling_rate=16000)[0]["audio"]["array"]
    assert higher.shape == (16000,)
    expected = 10_000 / 32768 * np.sin(2 * np.pi * 200 * np.arange(16000) / 16000)
    assert np.abs(higher - expected)[100:-100].max() < 2e-3


def test_what_cannot_be_opened_says_why(tmp_path):
    with pytest.raises(ValueError, match="there is no file, folder or pattern with files"):
        open_source(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="is empty"):
        open_source(tmp_path)
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(ValueError, match=r"the format \.xyz is not known; known are \.jsonl, "):
        open_source(tmp_path / "a.xyz")
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"has 1 \.jsonl, 1 \.txt, 1 \.xyz; give a pattern of files of one format"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="a int has no rows by index"):
        open_source(3)
    with pytest.raises(ValueError, match="the options cache are of files; list takes none"):
        open_source(ROWS, cache="x")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
        open_source(tmp_path / "a.parquet")


def test_a_cell_decodes_nothing_else(tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.png").write_bytes(b"no image")
    assert open_source(tmp_path / "images").cell(0, "label") == 0
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for kind, content in (("png", b"no image"), ("cls", b"3")):
            member = tarfile.TarInfo(f"1.{kind}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    assert open_source(tmp_path / "a.tar").cell(0, "cls") == 3
    import datasets

    assert open_source(datasets.Dataset.from_list(ROWS)).cell(2, "label") == 2


def test_the_last_line_without_its_end_has_its_number(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n\n{"x": 2}')
    source = open_source(tmp_path / "rows.jsonl")
    assert [source.name(i).rpartition(":")[2] for i in range(len(source))] == ["1", "3"]
