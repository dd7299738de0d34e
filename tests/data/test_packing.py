import numpy as np
import pytest

from tutti.data import packing
from tutti.data.packing import open_packed, pack
from tutti.data.text_folder import read_corpus
from tutti.data.tokenizer import train_tokenizer


@pytest.fixture
def documents(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"document {i} " + "word " * i)
    return read_corpus(folder, held_out=0).train


@pytest.fixture
def tokenizer(documents):
    return train_tokenizer([d.read() for d in documents], vocab_size=280)


def expected(tokenizer, documents):
    return [i for d in documents for i in [*tokenizer(d.read())["input_ids"], 0]]


def test_the_documents_follow_each_other_with_an_end_each(tokenizer, documents, tmp_path):
    packed = pack(tmp_path / "p", "train", tokenizer, documents)
    row = packed.open()
    assert row.dtype == np.uint16 and isinstance(row, np.memmap)
    assert row.tolist() == expected(tokenizer, documents)
    assert packed.tokens == len(row) and packed.documents == 10
    assert packed.text_bytes == sum(d.size for d in documents)
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["train.bin", "train.json"]


def test_what_is_packed_is_not_packed_again(tokenizer, documents, tmp_path, monkeypatch):
    first = pack(tmp_path, "train", tokenizer, documents)
    monkeypatch.setattr(packing, "encode", None)
    assert pack(tmp_path, "train", tokenizer, documents) == first == open_packed(tmp_path, "train")


def test_an_interrupted_packing_goes_on_where_it_was(tokenizer, documents, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK", 3)
    real, calls = packing.encode, []

    def failing(tokenizer, texts):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(tokenizer, texts)

    monkeypatch.setattr(packing, "encode", failing)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path, "train", tokenizer, documents)
    assert open_packed(tmp_path, "train") is None
    with open(tmp_path / "train.bin.partial", "ab") as file:
        file.write(b"tokens that were written but not noted")
    packed = pack(tmp_path, "train", tokenizer, documents)
    assert calls == [3, 3, 3, 3, 1]  # the third chunk again, none of the first two
    assert packed.open().tolist() == expected(tokenizer, documents)


def test_tokens_lost_by_a_crash_are_packed_again(tokenizer, documents, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK", 3)
    seen = []

    def stop(done, total):
        seen.append(done)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path, "train", tokenizer, documents, stop)
    (tmp_path / "train.bin.partial").write_bytes(b"12")
    assert pack(tmp_path, "train", tokenizer, documents).open().tolist() == expected(tokenizer, documents)


def test_a_truncated_token_file_is_an_error(tokenizer, documents, tmp_path):
    packed = pack(tmp_path, "train", tokenizer, documents)
    packed.path.write_bytes(b"12")
    with pytest.raises(ValueError, match=rf"train\.bin has 2 bytes instead of {2 * packed.tokens}; delete"):
        open_packed(tmp_path, "train")


def test_progress_counts_bytes(tokenizer, documents, tmp_path):
    seen = []
    pack(tmp_path, "train", tokenizer, documents, lambda done, total: seen.append((done, total)))
    size = sum(d.size for d in documents)
    assert seen[-1] == (size, size)
