"""Checkpoints are complete or not there, whatever happens while they are written."""

import errno
import io
import json
import os
import re
import resource
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tutti
from tutti.checkpoint import folder as folders
from tutti.checkpoint import write as module
from tutti.checkpoint.checkpoints import Checkpoints, SaveError
from tutti.checkpoint.folder import find_fault, latest, manifest, step_of
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.launch.heartbeat import HEARTBEAT

STATE = {"a": torch.arange(1000.0), "b": torch.tensor(3)}
DATA = "__0_0.distcp"


def fill(folder):
    (folder / "config.json").write_text("{}")


def save(root, step, fill=fill, keep=3):
    checkpoints = Checkpoints(root, keep)
    checkpoints.save(step, {name: ShardedTensor.whole(x) for name, x in STATE.items()}, {"seed": 7}, fill)
    return checkpoints.wait()


@pytest.fixture
def root(tmp_path):
    """Checkpoints of steps 10 and 20."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    return tmp_path


def test_what_is_saved_comes_back(root):
    newest = latest(root, say=pytest.fail)
    assert newest == Checkpoints(root).latest(pytest.fail) == root / "step-00000020" and step_of(newest) == 20
    stored = CheckpointReader(newest)
    assert stored.tensors.keys() == STATE.keys() and all(torch.equal(stored.whole(k), STATE[k]) for k in STATE)
    assert find_fault(newest) is None and manifest(newest)["seed"] == 7


def test_only_the_newest_are_kept(root):
    for step in (30, 40):
        save(root, step, keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["step-00000030", "step-00000040"]
    with pytest.raises(ValueError, match="keep is 0; it must be at least 1"):
        Checkpoints(root, keep=0)


def test_a_damaged_one_of_a_later_step_does_not_count_among_those_kept(root):
    truncate(root / "step-00000020" / "manifest.json")
    save(root, 15, keep=1)
    assert latest(root) == root / "step-00000015"


def test_no_checkpoint_is_none(tmp_path):
    assert latest(tmp_path, say=pytest.fail) is None
    assert latest(tmp_path / "missing", say=pytest.fail) is None
    assert Checkpoints(tmp_path / "missing").latest(pytest.fail) is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("file", "damage", "fault"),
    [
        ("manifest.json", os.unlink, "it has no manifest.json"),
        ("manifest.json", truncate, "its manifest.json is damaged"),
        ("manifest.json", directory, "its manifest.json cannot be read: Is a directory"),
        ("config.json", os.unlink, "config.json is missing"),
        (DATA, truncate, f"{DATA} has [0-9]+ bytes instead of [0-9]+"),
        (DATA, flip, f"{DATA} has changed since it was written"),
        (".metadata", flip, ".metadata has changed since it was written"),
    ],
)
@pytest.mark.parametrize("find", [latest, lambda root, say: Checkpoints(root).latest(say)])
def test_a_damaged_checkpoint_is_skipped_and_that_is_said(root, file, damage, fault, find):
    damage(root / "step-00000020" / file)
    said = []
    assert find(root, said.append) == root / "step-00000010"
    (line,) = said
    assert re.fullmatch(f"checkpoint {root / 'step-00000020'} is not complete: {fault}: skipped", line)


def test_a_file_that_cannot_be_read_is_a_fault_of_its_checkpoint(root, monkeypatch):
    real = folders.describe

    def describe(path):
        if path == root / "step-00000020" / DATA:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(folders, "describe", describe)
    said = []
    assert Checkpoints(root).latest(said.append) == root / "step-00000010"
    assert f"{DATA} cannot be read: Input/output error" in said[0]


def test_a_watchdog_is_told_of_what_takes_long(root, monkeypatch):
    seen, find, write = [], folders.find_fault, module.write
    monkeypatch.setattr(folders, "find_fault", lambda *a: seen.append(HEARTBEAT.busy) or find(*a))
    Checkpoints(root).latest()
    waited = threading.Event()
    monkeypatch.setattr(module, "write", lambda *a: waited.wait(10) and write(*a))
    checkpoints = Checkpoints(root)
    checkpoints.save(30, {"a": ShardedTensor.whole(STATE["a"])})
    monkeypatch.setattr(checkpoints._thread, "join", lambda: (seen.append(HEARTBEAT.busy), waited.set()))
    checkpoints.wait()
    assert seen == ["loads a checkpoint", "saves a checkpoint"] and HEARTBEAT.busy == ""


def test_a_half_written_checkpoint_is_skipped_and_cleared_away(root):
    (root / ".writing-step-00000030").mkdir()
    said = []
    assert latest(root, said.append) == root / "step-00000020"
    assert said == ["the checkpoint of step 30 was not finished: skipped"]
    assert Checkpoints(root).latest(said.append) == root / "step-00000020" and said[1:] == said[:1]
    assert not list(root.glob(".writing-*"))


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(root):
    truncate(root / "step-00000020" / "config.json")
    save(root, 20)
    assert latest(root, say=pytest.fail) == root / "step-00000020"


def contents(root: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_crash_before_the_second_rename_puts_the_replaced_one_back(root):
    shutil.copytree(root / "step-00000020", root / ".writing-step-00000020")
    os.rename(root / "step-00000020", root / ".replaced-step-00000020")
    said = []
    assert Checkpoints(root).latest(said.append) == root / "step-00000020"
    assert said == ["the checkpoint of step 20 was not finished: skipped"]
    assert sorted(p.name for p in root.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_second_rename_that_fails_puts_the_replaced_one_back(root, monkeypatch):
    real = Path.rename

    def rename(path, to):
        if path.name.startswith(".writing-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    before = contents(root)
    with pytest.raises(SaveError, match=r"step 20 in .*Input/output error; .*step-00000020 is intact"):
        save(root, 20)
    assert contents(root) == before


def test_when_the_disk_takes_no_more_the_checkpoints_before_are_intact(root):
    before = contents(root)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a real write that really fails
    try:
        with pytest.raises(
            SaveError, match=r"step 30 in .*(File too large|failed writing).*; .*step-00000020 is intact"
        ):
            save(root, 30, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(root) == before and not list(root.glob(".writing-*"))
    assert save(root, 30, keep=1) == latest(root, say=pytest.fail)


@pytest.mark.parametrize("moment", range(4))
def test_a_full_disk_at_any_moment_loses_nothing(root, monkeypatch, moment):
    calls, real = [], folders.to_disk

    def full(path):
        calls.append(path)
        if len(calls) == moment + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path)

    monkeypatch.setattr(folders, "to_disk", full)
    with pytest.raises(SaveError, match="No space left on device"):
        save(root, 30, keep=1)
    newest = latest(root, say=pytest.fail)
    assert newest in (root / "step-00000020", root / "step-00000030")  # the last moment is after the rename
    assert find_fault(newest) is None and (root / "step-00000020").exists()


def test_the_first_checkpoint_failing_says_that_there_is_none(tmp_path):
    def broken(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SaveError, match="there is no checkpoint before it"):
        save(tmp_path, 1, broken, keep=1)


def test_the_manifest_names_every_file(root):
    about = json.loads((root / "step-00000010" / "manifest.json").read_text())
    assert about["step"] == 10 and about["files"].keys() == {"config.json", DATA, ".metadata"}
    for name, entry in about["files"].items():
        assert entry["bytes"] == (root / "step-00000010" / name).stat().st_size


def test_the_state_of_the_moment_is_saved_while_training_goes_on(tmp_path, monkeypatch):
    begun, go, real = threading.Event(), threading.Event(), module.write

    def slow(*args):
        begun.set()
        go.wait()
        return real(*args)

    monkeypatch.setattr(module, "write", slow)
    state, checkpoints = torch.arange(10.0), Checkpoints(tmp_path)
    checkpoints.save(1, {"a": ShardedTensor.whole(state)})
    assert begun.wait(10) and checkpoints.done() is None
    state.zero_()  # the next step
    go.set()
    assert checkpoints.wait() == tmp_path / "step-00000001" and checkpoints.wait() is None
    assert torch.equal(CheckpointReader(tmp_path / "step-00000001").whole("a"), torch.arange(10.0))


def test_a_second_folder_gets_each_and_is_looked_into_where_the_first_has_none(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoints = Checkpoints(first, 2, second)
    for step in (1, 2, 3):
        checkpoints.save(step, {name: ShardedTensor.whole(x) for name, x in STATE.items()})
        checkpoints.wait()
    assert [p.name for p in folders.folders(second)] == ["step-00000003", "step-00000002"]
    assert latest(second, pytest.fail) == second / "step-00000003" and checkpoints.latest(pytest.fail).parent == first
    for folder in folders.folders(first):
        (folder / DATA).unlink()
    said = []
    assert checkpoints.latest(said.append) == second / "step-00000003"
    assert said == [f"checkpoint {first}/step-00000003 is not complete: {DATA} is missing: skipped"]


def test_of_two_folders_the_newest_is_taken_and_both_are_cleared(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, 1)
    save(second, 1)
    assert Checkpoints(first, 2, second).latest(pytest.fail) == first / "step-00000001"
    save(second, 2)
    for root in (first, second):
        (root / ".writing-step-00000003").mkdir()
    assert Checkpoints(first, 2, second).latest() == second / "step-00000002"
    assert not list(tmp_path.glob("*/.writing-*"))


def test_where_the_second_folder_is_full_the_first_goes_on(tmp_path, monkeypatch):
    first, second, real = tmp_path / "first", tmp_path / "second", shutil.copyfile

    def full(source, target, **options):
        if str(target).endswith(DATA):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(source, target, **options)

    checkpoints = Checkpoints(first, 1, second)
    for step in (1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfile", full if step == 2 else real)
            checkpoints.save(step, {name: ShardedTensor.whole(x) for name, x in STATE.items()})
            newest = first / f"step-0000000{step}"
            if step == 2:
                with pytest.warns(match=f"{newest} is complete, and has no second copy: {second}: .*No space left"):
                    assert checkpoints.wait() == newest
                assert [path.name for path in second.iterdir()] == ["step-00000001"]
            else:
                assert checkpoints.wait() == newest
        assert list(first.iterdir()) == [newest]
    assert [path.name for path in second.iterdir()] == ["step-00000003"]


def test_a_model_with_an_empty_buffer_is_loaded(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    model.register_buffer("nothing", torch.zeros(0, 3))
    batch = (torch.randn(2, 4),)

    def loss(model, batch):
        return model(*batch).sum() + model.get_buffer("nothing").sum()

    step = tutti.parallelize(model, torch.optim.SGD(model.parameters()), batch, loss=loss, level="O0", cluster="cpu:1")
    step(batch)
    checkpoints = tutti.Checkpoints(tmp_path)
    step.save(checkpoints)
    before, saved = step.training_state(), checkpoints.wait()
    assert "buffer:nothing" in before and saved
    step(batch)
    assert step.load(saved) > 0 and all(torch.equal(x, before[name]) for name, x in step.training_state().items())


@pytest.mark.parametrize("room", [0, 100, 650, 1200, 5000])
def test_a_disk_that_fills_up_inside_of_a_file_is_said_to_be_full(tmp_path, monkeypatch, room):
    """Where writing fails, torch's writer of archives says only that a position is not the expected one."""

    class Full(io.RawIOBase):
        def __init__(self):
            self.left = room

        def write(self, data):
            if len(data) > self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= len(data)
            return len(data)

    @contextmanager
    def opened(self, path, mode):
        yield Full()

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystem.create_stream", opened)
    with pytest.raises(SaveError, match="No space left on device"):
        save(tmp_path, 10)
