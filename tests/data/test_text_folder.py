import os
import sys

import pytest

from tutti.data.text_folder import STDLIB, read_corpus


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.py").write_text(f"x = {i}\n")
    return tmp_path


def names(documents):
    return [d.path.name for d in documents]


def test_every_file_is_read_once_in_path_order(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "a.py").write_text("a = 'caf\u00e9'\n", encoding="utf-8")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "b.py").write_text("not ours")
    (folder / "empty.py").write_text("")
    (folder / "notes.txt").write_text("not matched")
    corpus = read_corpus(folder, ("*.py",), held_out=0)
    assert names(corpus.train) == [f"{i:02}.py" for i in range(40)] + ["a.py"]
    assert corpus.held_out == ()
    assert corpus.train[-1].read() == "a = 'caf\u00e9'\n"
    assert corpus.size == sum(d.path.stat().st_size for d in corpus.train)


def test_the_split_depends_on_the_content_of_each_document_alone(folder):
    corpus = read_corpus(folder, held_out=0.25)
    assert 0 < len(corpus.held_out) < 25
    assert sorted(names(corpus.train) + names(corpus.held_out)) == [f"{i:02}.py" for i in range(40)]
    held_out = {d.read() for d in corpus.held_out}
    for path in folder.iterdir():  # other names, and half of the files gone
        path.rename(folder / f"renamed-{path.name}")
    for path in sorted(folder.iterdir())[:20]:
        path.unlink()
    again = read_corpus(folder, held_out=0.25)
    assert {d.read() for d in again.held_out} == held_out - {f"x = {i}\n" for i in range(20)}


def test_one_document_is_held_out_even_of_few(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    corpus = read_corpus(tmp_path, held_out=0.001)
    assert len(corpus.train) == len(corpus.held_out) == 1
    (tmp_path / "b.txt").unlink()
    with pytest.raises(ValueError, match=r"one document cannot be both .*a\.txt"):
        read_corpus(tmp_path)


def test_the_key_follows_content_and_split(folder):
    key = read_corpus(folder).key
    assert read_corpus(folder).key == key
    assert read_corpus(folder, held_out=0.5).key != key
    (folder / "00.py").write_text("x = 100\n")
    assert read_corpus(folder).key != key


def test_broken_utf8_is_skipped_and_counted(folder):
    (folder / "broken.py").write_bytes(b"# latin: \xe9\n")
    corpus = read_corpus(folder)
    assert corpus.undecodable == (folder / "broken.py",)
    assert len(corpus.train) + len(corpus.held_out) == 40
    assert "1 skipped (not UTF-8): broken.py" in corpus.summary()


def test_an_unreadable_file_is_reported_and_the_rest_read(folder):
    os.symlink(folder / "nowhere", folder / "dangling.py")
    corpus = read_corpus(folder)
    assert corpus.unreadable == ((folder / "dangling.py", "No such file or directory"),)
    assert "1 unreadable (No such file or directory): dangling.py" in corpus.summary()


def test_progress_counts_files(folder):
    seen = []
    read_corpus(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 40) for i in range(41)]


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"the corpus folder {tmp_path} is empty"):
        read_corpus(tmp_path)


def test_a_folder_without_a_match_says_what_it_holds(folder):
    with pytest.raises(ValueError, match=r"no readable text matches \*\.md under .*; it holds 40 \.py"):
        read_corpus(folder, ("*.md",))


def test_a_folder_of_broken_files_says_so(tmp_path):
    (tmp_path / "a.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"1 files are not UTF-8: a\.py"):
        read_corpus(tmp_path)


def test_a_missing_folder_names_the_corpus_that_is_always_there(tmp_path):
    with pytest.raises(ValueError, match="missing is not a folder; give one, or 'stdlib'"):
        read_corpus(tmp_path / "missing")


def test_a_held_out_fraction_outside_its_range_is_an_error(folder):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), not 1"):
        read_corpus(folder, held_out=1)


def test_the_standard_library_is_a_corpus():
    corpus = read_corpus(STDLIB, ("*.py",))
    assert corpus.size > 5e6
    assert any(d.path.name == "dataclasses.py" for d in (*corpus.train, *corpus.held_out))
    assert not any("site-packages" in d.path.parts for d in corpus.train)
    assert str(corpus.root).startswith(sys.base_prefix)
