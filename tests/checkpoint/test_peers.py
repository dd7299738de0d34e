"""Copies in memory: four processes as two machines, of which one is lost, and what a restart finds then."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.checkpoint import folder as folders
from tutti.checkpoint import passing, peers
from tutti.checkpoint import peer_checkpoint as gathered
from tutti.checkpoint.checkpoints import SaveError
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.sim.restart import Restart, restart


def parallelized(plan: str, seed: int = 0, cluster: str = "auto") -> tutti.Step:
    model = zoo.llama(4, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.parallelize(model, optimizer, zoo.tokens(120), cluster=cluster, plan=plan, level="O0",
                             accumulate=4 if "pp" in plan else 1)  # fmt: skip


def machine(root: str, per_machine: int) -> Path:
    """The memory of the machine that a process is on."""
    folder = Path(root, f"machine {int(os.environ['RANK']) // per_machine}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def loss_and_copies(root: str, per_machine: int = 2) -> tuple[float, list[str]]:
    """A copy in memory after each of two steps; the loss of the third, and what files are on this machine."""
    passing.CHUNK, gathered.ROUND = 5000, 4000  # several of each
    step = parallelized("dp2xtp2")
    checkpoints = tutti.Checkpoints(Path(root, "disk"), memory=machine(root, per_machine))
    assert checkpoints.latest(pytest.fail) is None
    step(zoo.tokens(120))
    step.save(checkpoints)
    for seed in (1, 2):
        step.save(checkpoints, in_memory=True)
        assert checkpoints.wait() is None
        loss = step(zoo.tokens(120, seed=seed)).item()
    assert checkpoints.peers
    (copy,) = folders.folders(checkpoints.peers.folder)
    return loss, sorted(path.name for path in copy.iterdir())


def resumed(root: str, plan: str, per_machine: int = 2) -> tuple[str, int, int, int, float, list[str]]:
    """What is found, the step it is of, bytes read and sent, the loss of the third step, and what was said."""
    passing.CHUNK, gathered.ROUND = 5000, 4000
    said: list[str] = []
    step = parallelized(plan, seed=1 + int(os.environ["RANK"]))
    checkpoints = tutti.Checkpoints(Path(root, "disk"), memory=machine(root, per_machine))
    latest = checkpoints.latest(said.append)
    assert latest is not None
    count, done = step.load(latest), step.steps
    for seed in range(done, 3):
        loss = step(zoo.tokens(120, seed=seed)).item()
    own_bytes = sum(x.nbytes for x in step.store.parts[0].values())
    assert 0 < count <= own_bytes
    sent = latest.sent if isinstance(latest, PeerCheckpoint) else -1
    return type(latest).__name__, done, count, sent, loss, said


@pytest.fixture(scope="module")
def jobs(pool, tmp_path_factory) -> dict[int, tuple[Path, list[tuple[float, list[str]]]]]:
    """By processes of a machine: where a job of four was left, and what `kept` found."""
    roots = {per_machine: tmp_path_factory.mktemp("job") for per_machine in (1, 2)}
    return {n: (root, pool.run(loss_and_copies, str(root), n)) for n, root in roots.items()}


@pytest.fixture
def left(jobs, tmp_path):
    """A copy of it, to be lost in parts; the loss of the third step, and the files of each rank's machine."""

    def of(per_machine: int) -> tuple[Path, float, list[list[str]]]:
        root, ranks = jobs[per_machine]
        shutil.copytree(root, tmp_path / "job")
        return tmp_path / "job", ranks[0][0], [names for _, names in ranks]

    return of


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def copies_in(root: Path) -> list[Path]:
    return sorted(root.glob("machine */tutti-*/step-*"))


def predicted(plan: str, per_machine: int, lost: int) -> Restart:
    """What a dry run says of it."""
    after = parallelized(plan, cluster="cpu:4")
    return restart(after.graph, after.plan, per_machine, parallelized("dp2xtp2", cluster="cpu:4").plan, lost=lost)


@pytest.mark.parametrize("plan, lost", [slow("dp2xtp2", 0), ("dp2xtp2", 1), slow("zero3", 1), slow("pp2xtp2", 0)])
def test_the_loss_of_a_machine_loses_nothing(pool, left, plan, lost):
    root, expected, files = left(2)
    data = [f"__{rank}_0.distcp" for rank in range(4)]
    assert all(names == [".metadata", *data, "manifest.json"] for names in files), "with two machines each has all"
    shutil.rmtree(root / f"machine {lost}")
    forecast, results = predicted(plan, 2, lost), pool.run(resumed, str(root), plan)
    assert forecast.devices == [row[2] for row in results]
    assert forecast.sent == [results[2 * i][3] + results[2 * i + 1][3] for i in range(2)]
    for rank, (kind, done, count, sent, loss, said) in enumerate(results):
        assert (kind, done, said) == ("PeerCheckpoint", 2, [])
        assert sent == (count if rank // 2 == lost else 0), "what is on a rank's own machine is read there"
        assert loss == (expected if plan == "dp2xtp2" else pytest.approx(expected, rel=1e-5))


@pytest.mark.slow
def test_each_machine_has_its_own_parts_and_those_of_the_one_before(pool, left):
    root, expected, files = left(1)
    for rank, names in enumerate(files):
        assert names == [".metadata", *sorted(f"__{r}_0.distcp" for r in (rank, (rank - 1) % 4)), "manifest.json"]
    shutil.rmtree(root / "machine 2")
    results = pool.run(resumed, str(root), "dp2xtp2", 1)
    assert [(kind, done, loss) for kind, done, _, _, loss, _ in results] == [("PeerCheckpoint", 2, expected)] * 4
    forecast = predicted("dp2xtp2", 1, lost=2)
    assert [row[2] for row in results] == forecast.devices and [row[3] for row in results] == forecast.sent


def test_where_two_neighbours_are_lost_the_disk_is_taken(pool, left):
    root, loss, _ = left(1)
    shutil.rmtree(root / "machine 2")
    shutil.rmtree(root / "machine 3")
    results = pool.run(resumed, str(root), "dp2xtp2", 1)
    assert [(kind, done, last) for kind, done, *_, last, _ in results] == [("PosixPath", 1, loss)] * 4
    said = ["the checkpoint of step 2 in memory is not complete: __2_0.distcp is lost: skipped"]
    assert [row[-1] for row in results] == [said, [], [], []]


@pytest.mark.parametrize(("damaged", "expected"), [slow([0], ("PeerCheckpoint", 2)), ([0, 1], ("PosixPath", 1))])
def test_what_is_damaged_is_read_elsewhere_or_not_at_all(pool, left, damaged, expected):
    root, loss, _ = left(2)
    for i in damaged:
        flip(copies_in(root)[i] / "__1_0.distcp")
    for kind, done, _, _, last, _ in pool.run(resumed, str(root), "dp2xtp2"):
        assert ((kind, done), last) == (expected, loss)


def test_what_was_not_finished_is_never_taken(pool, left):
    root, loss, _ = left(2)
    for copy in copies_in(root):
        copy.rename(copy.with_name(".writing-step-00000002"))
    for kind, done, _, _, last, said in pool.run(resumed, str(root), "dp2xtp2"):
        assert (kind, done, last, said) == ("PosixPath", 1, loss, [])
    assert not list(root.glob("machine */*/.writing-*"))


def test_of_another_run_in_the_same_folder_nothing_is_taken(pool, left):
    root, *_ = left(2)
    shutil.rmtree(root / "disk")
    assert pool.run(finds_nothing, str(root)) == [True] * 4


def finds_nothing(root: str) -> bool:
    parallelized("dp2xtp2")
    return tutti.Checkpoints(Path(root, "disk"), memory=machine(root, 2)).latest(pytest.fail) is None


def without_room(root: str, what: str) -> tuple[str, str, bool]:
    """What is said when the second copy cannot be kept, why there are no more, and whether the first is found."""
    step = parallelized("dp2xtp2")
    checkpoints = tutti.Checkpoints(Path(root, "disk"), memory=machine(root, 2))
    step.save(checkpoints, in_memory=True)
    checkpoints.wait()
    step(zoo.tokens(120))
    full = shutil._ntuple_diskusage(1, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        if what == "before":
            patch.setattr(peers.shutil, "disk_usage", lambda folder: full)
        elif os.environ["RANK"] == "2":
            at, name = {"cleared": (folders, "clear"), "looked": (peers.shutil, "disk_usage"),
                        "read": (passing, "_contents"), "received": (passing, "open")}[what]  # fmt: skip
            patch.setattr(at, name, fails, raising=False)
        step.save(checkpoints, in_memory=True)
        with pytest.raises(SaveError) as said:
            checkpoints.wait()
    with pytest.raises(ValueError) as refused:
        step.save(checkpoints, in_memory=True)
    latest = checkpoints.latest(pytest.fail)
    assert isinstance(latest, PeerCheckpoint) and latest.step == 0
    checkpoints.forget()
    return str(said.value), str(refused.value), machine(root, 2).exists() and not any(machine(root, 2).iterdir())


def fails(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("what", "why"), [
    slow("before", "a copy needs .*; {root}/machine 0/tutti-.* has 1 B left"),
    ("looked", "No space left on device"),
    *(slow(phase, "No space left on device") for phase in ("cleared", "read", "received")),
])  # fmt: skip
def test_where_memory_does_not_suffice_that_is_said_and_the_copy_before_stays(pool, tmp_path, what, why):
    results = pool.run(without_room, str(tmp_path), what)
    assert len({said for said, *_ in results}) == 1, "all ranks know"
    for said, refused, forgotten in results:
        expected = f"could not keep step 1 in memory: .*{why.format(root=tmp_path)}; no more copies are kept there"
        assert re.fullmatch(expected, said), said
        assert "in_memory=True needs a folder in memory" in refused and forgotten


def test_one_process_keeps_a_copy_too(tmp_path):
    model = zoo.llama(2)
    step = tutti.parallelize(model, torch.optim.AdamW(model.parameters()), zoo.tokens(), cluster="cpu:1", level="O0")
    step(zoo.tokens())
    memory = tmp_path / "memory"
    memory.mkdir()
    checkpoints = tutti.Checkpoints(tmp_path / "disk", memory=memory)
    assert checkpoints.peers
    (checkpoints.peers.folder / "step-00000009").mkdir()  # of a time that is lost
    step.save(checkpoints, in_memory=True)
    before = step.training_state()
    step(zoo.tokens())
    checkpoints.wait()
    assert [path.name for path in checkpoints.peers.folder.iterdir()] == ["step-00000001"]
    latest = checkpoints.latest(pytest.fail)
    assert isinstance(latest, PeerCheckpoint) and step.load(latest) > 0
    after = step.training_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_there_is_no_more_room_than_the_machine_has_memory(monkeypatch):
    monkeypatch.setattr(peers.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 60, 0, 1 << 60))
    meminfo = Path("/proc/meminfo")
    total = meminfo.exists() and int(meminfo.read_text().split()[1]) * 1024
    assert 0 < peers._room(Path("/")) <= (total or 1 << 60)


def test_memory_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="memory='/no/memory': no such folder"):
        tutti.Checkpoints(tmp_path, memory="/no/memory")


def test_ranks_that_do_not_know_one_another_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="build the step before its Checkpoints"):
        tutti.Checkpoints(tmp_path)
