import errno
import json
import os
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from tutti.train import checkpoint
from tutti.train.checkpoint import SaveError, find_fault, latest, save, step_of

STATE = {"a": torch.arange(1000.0), "step": torch.tensor(3)}


def fill(folder):
    save_file(STATE, folder / "state.safetensors")
    (folder / "config.json").write_text("{}")


@pytest.fixture
def root(tmp_path):
    """Checkpoints of steps 10 and 20."""
    save(tmp_path, 10, fill, keep=3)
    save(tmp_path, 20, fill, keep=3)
    return tmp_path


def test_what_is_saved_comes_back(root):
    newest = latest(root, say=pytest.fail)
    assert newest == root / "step-00000020" and step_of(newest) == 20
    loaded = load_file(newest / "state.safetensors")
    assert loaded.keys() == STATE.keys() and all(torch.equal(loaded[k], STATE[k]) for k in STATE)
    assert find_fault(newest) is None


def test_only_the_newest_are_kept(root):
    for step in (30, 40):
        save(root, step, fill, keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["step-00000030", "step-00000040"]


def test_no_checkpoint_is_none(tmp_path):
    assert latest(tmp_path, say=pytest.fail) is None
    assert latest(tmp_path / "missing", say=pytest.fail) is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("file", "damage", "fault"),
    [
        ("manifest.json", os.unlink, "it has no manifest.json"),
        ("manifest.json", truncate, "its manifest.json is damaged"),
        ("config.json", os.unlink, "config.json is missing"),
        ("state.safetensors", truncate, "state.safetensors has 4135 bytes instead of 4136"),
        ("state.safetensors", flip, "state.safetensors has changed since it was written"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_that_is_said(root, file, damage, fault):
    damage(root / "step-00000020" / file)
    said = []
    assert latest(root, said.append) == root / "step-00000010"
    assert said == [f"checkpoint {root / 'step-00000020'} is not complete: {fault}: skipped"]


def test_a_half_written_checkpoint_is_skipped_and_cleared_away_by_the_next(root):
    (root / ".writing-00000030").mkdir()
    said = []
    assert latest(root, said.append) == root / "step-00000020"
    assert said == ["the checkpoint of step 30 was not finished: skipped"]
    save(root, 30, fill, keep=3)
    assert latest(root, say=pytest.fail) == root / "step-00000030"


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(root):
    truncate(root / "step-00000020" / "config.json")
    save(root, 20, fill, keep=3)
    assert latest(root, say=pytest.fail) == root / "step-00000020"


def test_when_the_disk_takes_no_more_the_checkpoints_before_are_intact(root):
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a real write that really fails
    try:
        with pytest.raises(SaveError, match=r"step 30 in .*File too large.*; .*step-00000020 is intact"):
            save(root, 30, fill, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before
    assert not list(root.glob(".writing-*"))
    assert save(root, 30, fill, keep=1) == latest(root, say=pytest.fail)


@pytest.mark.parametrize("moment", range(5))
def test_a_full_disk_at_any_moment_loses_nothing(root, monkeypatch, moment):
    calls, real = [], checkpoint._to_disk

    def full(path):
        calls.append(path)
        if len(calls) == moment + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path)

    monkeypatch.setattr(checkpoint, "_to_disk", full)
    with pytest.raises(SaveError, match="No space left on device"):
        save(root, 30, fill, keep=1)
    newest = latest(root, say=pytest.fail)
    assert newest in (root / "step-00000020", root / "step-00000030")  # the last moment is after the rename
    assert find_fault(newest) is None and (root / "step-00000020").exists()


def test_the_first_checkpoint_failing_says_that_there_is_none(tmp_path):
    def broken(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SaveError, match="there is no checkpoint before it"):
        save(tmp_path, 1, broken, keep=1)


def test_the_manifest_names_every_file(root):
    manifest = json.loads((root / "step-00000010" / "manifest.json").read_text())
    assert manifest["step"] == 10
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        "config.json": 2,
        "state.safetensors": 4136,
    }
