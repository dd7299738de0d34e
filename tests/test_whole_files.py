import os
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


def test_drafts_of_killed_processes_are_deleted(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    with whole_file(path) as draft:
        draft.touch()
        machine, _, token = draft.name.removesuffix(UNFINISHED).rpartition(".")[2].split("-")
    killed = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    gone, alive = killed.stdout.strip(), str(os.getpid())
    names = {
        f".big.bin.{machine}-{gone}-{token}{UNFINISHED}": False,
        f".folder.{machine}-{gone}-{token}{UNFINISHED}": False,
        f".a.txt.{machine}-{alive}-{token}{UNFINISHED}": True,
        f".a.txt.{'0' * 8}-{gone}-{token}{UNFINISHED}": True,  # another machine's
        f".old.txt.{'0' * 8}-{gone}-{token}{UNFINISHED}": False,
        f".mine{UNFINISHED}": True,  # of another program
        f".huge.{machine}-{'9' * 30}-{token}{UNFINISHED}": True,
    }
    for name in names:
        (tmp_path / name).mkdir() if ".folder." in name else (tmp_path / name).touch()
        if ".folder." in name:
            (tmp_path / name / "inside").touch()
        if ".old." in name:
            os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(whole_files, "SWEPT", set())
    write_text(path, "new")
    assert {x.name for x in tmp_path.iterdir()} == {"a.txt", *(name for name, stays in names.items() if stays)}


def test_processes_that_write_one_folder_do_not_mix(tmp_path):
    folder = tmp_path / "folder"
    with whole_folder(folder) as one, whole_folder(folder) as other:
        (one / "one").touch()
        (other / "other").touch()
        assert one != other
    assert [x.name for x in folder.iterdir()] == ["one"] and list(tmp_path.iterdir()) == [folder]


def test_the_folder_that_a_link_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with whole_folder(tmp_path / "link") as draft:
        (draft / "new.txt").touch()
    assert (tmp_path / "link").is_symlink() and [x.name for x in (tmp_path / "there").iterdir()] == ["new.txt"]


def test_a_folder_that_cannot_be_replaced_leaves_both(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old.txt").touch()

    def rename(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as draft:
        (draft / "new.txt").touch()
    assert (folder / "old.txt").exists() and (draft / "new.txt").exists()
