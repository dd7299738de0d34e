"""A checkpoint runs no code and leaves its folder by no name, whoever opens it; refused, it changes nothing."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import shutil
import socket
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tutti
from tutti import cli
from tutti.checkpoint import folder as folders
from tutti.checkpoint import peers, unpickle
from tutti.checkpoint.passing import pass_on
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.stores.weights import load_weights
from tutti.launch.launch import launch

DATA = "__0_0.distcp"


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable, *args: object):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def system(marker: Path) -> bytes:
    return pickle.dumps(Call(os.system, f"touch {marker}"))


def nested(marker: Path) -> bytes:
    """The call stands where a list of blocks is expected, and calls what a call returns."""
    inner = Call(builtins.eval, f"open({str(marker)!r}, 'w').close() or list")
    return pickle.dumps({"state_dict_metadata": {"a": Call(getattr, inner, "append")}})


def attribute(marker: Path) -> bytes:
    """Reaches a function through an attribute of a class that is allowed."""
    return b"\x80\x04\x8c\x05torch\x8c\x15Size.__new__.__self__\x93."


def assigned(marker: Path) -> bytes:
    """Gives a class of torch another method: state of a class is what is set on it."""
    where = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return b"\x80\x02" + where + b"(N}(X\x08\x00\x00\x00__repr__X\x01\x00\x00\x00xut" + b"b."


def opened(marker: Path) -> bytes:
    return b"\x80\x02" + b"cbuiltins\nopen\n(V" + str(marker).encode() + b"\nVw\ntR."


PAYLOADS = {system: "posix.system", nested: "builtins.getattr", attribute: "torch.Size.__new__.__self__",
            opened: "builtins.open"}  # fmt: skip


def parallelized() -> tutti.Step:
    torch.manual_seed(0)
    model = Squared(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.parallelize(model, optimizer, batch(), level="O0")


class Squared(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


def batch() -> dict[str, torch.Tensor]:
    return {"input": torch.ones(2, 3)}


@pytest.fixture(scope="module")
def step() -> tutti.Step:
    return parallelized()


@pytest.fixture
def root(step, tmp_path) -> Path:
    """Checkpoints of steps 1 and 2."""
    step.updates.done = 0
    checkpoints = tutti.Checkpoints(tmp_path / "checkpoints")
    for _ in range(2):
        step(batch())
        step.save(checkpoints)
        checkpoints.wait()
    return checkpoints.root


def rewrite(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file, and its size and checksum in the manifest."""
    (checkpoint / name).write_bytes(content)
    about = folders.manifest(checkpoint)
    about["files"][name] = folders.describe(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(folders.sealed(about)))


def rename(checkpoint: Path, old: str, new: str) -> None:
    """Give a file another name in the manifest and in `.metadata`, which has a length before each string."""
    about = folders.manifest(checkpoint)
    about["files"][new] = about["files"].pop(old)
    (checkpoint / "manifest.json").write_text(json.dumps(folders.sealed(about)))


def opens(step: tutti.Step, bad: Path, good: Path, tmp_path: Path, capsys) -> dict[str, str]:
    """What each way to open a checkpoint says of it."""
    said: dict[str, str] = {}
    before = step.training_state()
    with pytest.raises(ValueError) as error:
        step.load(bad)
    said["load"] = str(error.value)
    after = step.training_state()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before), "nothing changed"
    plan = tmp_path / "plan.json"
    step.plan.save(plan)
    for name, argv in {
        "show": ["checkpoint", "show", bad],
        "verify": ["checkpoint", "verify", bad],
        "diff": ["checkpoint", "diff", good, bad],
        "reshard": ["reshard", bad, tmp_path / "out", "--plan", plan],
    }.items():
        assert cli.main([str(x) for x in argv]) in (1, 2)
        out = capsys.readouterr()
        said[name] = " ".join((out.out + out.err).split())
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    return said


@pytest.mark.parametrize(("payload", "name"), PAYLOADS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_pickle_that_calls_is_refused_and_named(step, root, tmp_path, capsys, payload, name):
    marker, bad, good = tmp_path / "marker", root / "step-00000002", root / "step-00000001"
    rewrite(bad, ".metadata", payload(marker))
    said = opens(step, bad, good, tmp_path, capsys)
    assert all(f".metadata is a pickle that names {name}" in text for text in said.values()), said
    messages: list[str] = []
    assert tutti.Checkpoints(root).latest(messages.append) == good and name in messages[0]
    assert not marker.exists()


def test_the_payloads_would_have_run(tmp_path):
    for payload in (system, opened):
        result = pickle.loads(payload(tmp_path / payload.__name__))
        getattr(result, "close", int)()
        assert (tmp_path / payload.__name__).exists()


def test_no_class_outside_is_changed(step, root, tmp_path):
    from torch.distributed.checkpoint.metadata import Metadata

    before = Metadata.__repr__
    rewrite(root / "step-00000002", ".metadata", assigned(tmp_path))
    with pytest.raises(ValueError, match="damaged"):
        step.load(root / "step-00000002")
    assert Metadata.__repr__ is before


def test_a_block_that_calls_is_refused_before_any_is_read(step, root, tmp_path, capsys):
    """A block is an archive as torch.save writes it; the last one's header is made a pickle of the same size."""
    bad, marker = root / "step-00000002", tmp_path / "marker"
    content = bytearray((bad / DATA).read_bytes())
    at = content.rfind(b"ctorch._utils\n_rebuild_tensor_v2\n")
    payload = b"cposix\nsystem\n(Vtouch " + str(marker).encode() + b"\ntR."
    content[at : at + len(payload)] = payload
    rewrite(bad, DATA, bytes(content))
    before = step.training_state()
    with pytest.raises(ValueError, match=r"a stored tensor is a pickle that names posix\.system"):
        step.load(bad)
    after = step.training_state()
    assert all(torch.equal(before[k], after[k]) for k in before)
    plan = tmp_path / "plan.json"
    step.plan.save(plan)
    assert cli.main(["reshard", str(bad), str(tmp_path / "out"), "--plan", str(plan)]) == 2
    assert cli.main(["checkpoint", "diff", str(root / "step-00000001"), str(bad)]) == 2
    assert "posix.system" in capsys.readouterr().err and not marker.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "..\\secret", ""])
def test_a_name_in_the_manifest_may_not_leave_the_folder(step, root, tmp_path, capsys, name):
    (root / "secret").write_text("{}")
    bad = root / "step-00000002"
    rename(bad, DATA, name)
    said = opens(step, bad, root / "step-00000001", tmp_path, capsys)
    assert all("points outside the folder" in text for text in said.values()), said
    assert tutti.Checkpoints(root).latest(lambda _: None) == root / "step-00000001"


def test_a_name_in_the_metadata_may_not_leave_the_folder(step, root, tmp_path, capsys):
    bad = root / "step-00000002"
    shutil.copy(bad / DATA, root / "0_0.distcp")
    rewrite(bad, ".metadata", (bad / ".metadata").read_bytes().replace(DATA.encode(), b"../0_0.distcp"[: len(DATA)]))
    said = opens(step, bad, root / "step-00000001", tmp_path, capsys)
    assert all("points outside the folder" in text for text in said.values()), said


@pytest.mark.parametrize("name", [DATA, ".metadata", "manifest.json"])
def test_a_symbolic_link_out_of_the_folder_is_refused(step, root, tmp_path, capsys, name):
    bad = root / "step-00000002"
    shutil.move(bad / name, root / "elsewhere")
    (bad / name).symlink_to(root / "elsewhere")
    said = opens(step, bad, root / "step-00000001", tmp_path, capsys)
    assert all(f"{name} is a symbolic link out of the folder" in text for text in said.values()), said


def test_a_pipe_is_not_waited_for(step, root):
    bad = root / "step-00000002"
    (bad / DATA).unlink()
    os.mkfifo(bad / DATA)
    with pytest.raises(ValueError, match="is not a regular file"):
        step.load(bad)


def test_reshard_copies_what_the_manifest_lists(step, root, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (root / "step-00000002" / "config.json").symlink_to(tmp_path / "secret")
    step.plan.save(tmp_path / "plan.json")
    assert cli.main(["reshard", str(root), str(tmp_path / "out"), "--plan", str(tmp_path / "plan.json")]) == 0
    assert not (tmp_path / "out" / "step-00000002" / "config.json").exists()


def test_what_torch_writes_is_read(tmp_path):
    """Tensors of every dtype, the state of a model with an optimizer, and of dense tensors that are not contiguous."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64,
              torch.float8_e4m3fn, torch.uint16)  # fmt: skip
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"transposed": torch.arange(6.0).reshape(2, 3).T, "parameter": torch.nn.Parameter(torch.ones(2)),
                "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
                "view": torch.arange(10.0)[3:7], "scalar": torch.tensor(3), "empty": torch.empty(0, 4)}  # fmt: skip
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "number": 3, **tensors}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)  # pyright: ignore[reportPrivateImportUsage]
    stored = CheckpointReader(tmp_path)
    for name, whole in tensors.items():
        assert torch.equal(stored.whole(name).view(torch.uint8) if whole.dim() else stored.whole(name),
                           whole.detach().contiguous().view(torch.uint8) if whole.dim() else whole), name  # fmt: skip
    assert torch.equal(stored.whole("model.weight"), model.weight)
    assert torch.equal(stored.whole("optimizer.state.0.exp_avg"), optimizer.state[model.weight]["exp_avg"])


def test_a_damaged_pickle_is_a_value_error():
    for content in (b"", b"\x80\x04", b"\x80\x04N.", b"\x80\x04]."):
        with pytest.raises((ValueError, AttributeError)):
            unpickle.tensor_header(content)
    with pytest.raises(ValueError, match="is damaged"):
        unpickle.metadata(b"")


def test_a_compressed_block_is_refused(root):
    bad = root / "step-00000002"
    stored = CheckpointReader(bad)
    block = next(iter(stored.blocks.values()))[0]
    squeezed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO((bad / DATA).read_bytes()[block.offset :][: block.count])) as members:
        entries = {x.filename: x for x in members.infolist()}
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in entries:
            archive.writestr(name, b"x" * 40)
    (bad / DATA).write_bytes(squeezed.getvalue().ljust(block.offset + block.count, b"\0"))
    with pytest.raises(ValueError, match="cannot be loaded"):
        stored.whole(next(iter(stored.blocks)))


def test_names_of_weights_and_of_folders_in_memory(tmp_path):
    index = {"weight_map": {"a": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="leads out of the folder"):
        load_weights(tmp_path, [], {})
    (tmp_path / ".memory").write_text("x/../../home")
    with pytest.raises(OSError, match="is damaged"):
        tutti.Checkpoints(tmp_path, memory=tmp_path)


def test_a_folder_in_memory_of_another_user_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.os, "getuid", lambda: 12345)
    with pytest.raises(OSError, match="belongs to another user"):
        tutti.Checkpoints(tmp_path, memory=tmp_path)


def test_files_sent_by_another_machine_stay_in_the_folder(tmp_path):
    with pytest.raises(OSError, match="points outside the folder"):
        pass_on(tmp_path, {}, 0, {1: {"../x": {"bytes": 0}}}, None)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path.parent / "x").exists()


def test_metadata_from_another_machine_is_not_run(tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(ValueError, match=r"names posix\.system"):
        PeerCheckpoint(tmp_path, {"step": 1, "files": {}}, system(marker), {}, None)  # pyright: ignore[reportArgumentType]
    assert not marker.exists()


def listening() -> list[str]:
    """Addresses on which the processes of this job listen, as /proc has them."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                inodes[f"socket:[{columns[9]}]"] = columns[1].partition(":")[0]
    addresses = []
    for process in (os.getpid(), os.getppid()):
        for handle in Path(f"/proc/{process}/fd").iterdir():
            try:
                addresses += [inodes[link]] if (link := os.readlink(handle)) in inodes else []
            except OSError:
                continue
    dist.barrier()
    return addresses


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.starts
@pytest.mark.slow
def test_a_job_on_one_machine_listens_on_loopback_alone():
    loopback = {"0100007F", "00000000000000000000000001000000"}
    bound = {address for addresses in launch(listening, 2) for address in addresses}
    assert bound and bound <= loopback
    assert socket.gethostbyname("localhost") == "127.0.0.1"


def test_a_flipped_bit_is_noticed_where_a_folder_is_given(step, root):
    bad = root / "step-00000002"
    content = bytearray((bad / DATA).read_bytes())
    content[len(content) // 2] ^= 1
    (bad / DATA).write_bytes(content)
    before = step.state_dict()
    with pytest.raises(ValueError, match=f"{DATA} has changed since it was written"):
        step.load(bad)
    assert all(torch.equal(x, before[name]) for name, x in step.state_dict().items()), "nothing has changed"


@pytest.mark.parametrize("change", ["a fact", "its format"])
def test_a_manifest_that_was_edited_is_no_manifest(root, change):
    path = root / "step-00000002" / "manifest.json"
    about = json.loads(path.read_text())
    if change == "a fact":
        path.write_text(json.dumps({**about, "seed": about["seed"] + 1}))
        message = "its manifest.json is damaged"
    else:
        path.write_text(json.dumps(folders.sealed({**about, "format": 2})))
        message = "a later version wrote it, in format 2; this one reads format 1"
    with pytest.raises(ValueError, match=message):
        folders.manifest(path.parent)
