import subprocess
import sys
from pathlib import Path

import pytest

from tutti import whole_files
from tutti.whole_files import UNFINISHED, whole_file, whole_folder, write_text


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")
    with whole_file(path, durable=True) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path):
    path, folder = tmp_path / "a.txt", tmp_path / "folder"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    with whole_folder(folder) as draft:
        (draft / "b.txt").write_text("old")
    with pytest.raises(ValueError, match="no more"), whole_folder(folder) as draft:
        (draft / "c.txt").write_text("half")
        raise ValueError("no more")
    assert path.read_text() == "old"
    assert sorted(tmp_path.rglob("*")) == [path, folder, folder / "b.txt"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files, "to_disk", full)
    with pytest.raises(OSError, match=r"No space left on device.*a\.txt"):
        write_text(path, "new", durable=True)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_one_and_what_a_killed_process_left_of_it(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old.txt").touch()
    code = f"""
import os
from pathlib import Path
from tutti.whole_files import whole_folder
with whole_folder(Path({str(folder)!r})) as draft:
    (draft / "half").touch()
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert [x.name for x in folder.iterdir()] == ["old.txt"] and len(list(tmp_path.glob(f"*{UNFINISHED}"))) == 1
    with whole_folder(folder) as draft:
        (draft / "new.txt").touch()
    assert list(tmp_path.iterdir()) == [folder] and [x.name for x in folder.iterdir()] == ["new.txt"]
