"""Claim: a checkpoint of any plan on any number of devices is read by any other, bit for bit; each byte is written
once, and a rank reads what it holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.checkpoint.reader import CheckpointReader

PAIRS = [
    ("dp2", 2, "single", 1), slow("tp4", 4, "zero3", 3), slow("zero3", 3, "dp2xtp2", 4),
    slow("dp2xtp2", 4, "tp2xzero3", 6), slow("zero1", 8, "zero2", 5), slow("pp2xtp2", 4, "zero3", 4),
    slow("tp2", 2, "pp2xtp2", 4), ("pp4", 4, "pp2-interleaved2", 2), slow("zero3xoffload2", 2, "tp2", 2),
]  # fmt: skip


def parallelized(plan: str, devices: int, seed: int = 0, cluster: str | None = None) -> tutti.Step:
    model = zoo.llama(4, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.parallelize(
        model, optimizer, zoo.tokens(120), cluster=cluster or f"cpu:{devices}", plan=plan, level="O0",
        accumulate=4 if "pp" in plan else 1,
    )  # fmt: skip


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("before", "m", "after", "n"), PAIRS)
def test_any_plan_reads_what_any_other_wrote(before, m, after, n, tmp_path):
    first, second = parallelized(before, m), parallelized(after, n, seed=1)
    first(zoo.tokens(120))
    checkpoints = tutti.Checkpoints(tmp_path)
    first.save(checkpoints)
    folder = checkpoints.wait()
    assert folder == checkpoints.latest(pytest.fail)
    state = first.training_state()
    written = sum(block.count for blocks in CheckpointReader(folder).blocks.values() for block in blocks)
    numbers = sum(x.nbytes for name, x in state.items() if name != "step")
    assert numbers < written < numbers + 2000 * len(CheckpointReader(folder).blocks) * m, "each byte once, and headers"
    second.load(folder)
    assert same(state, second.training_state())


def saved_by_all(root: str) -> str:
    step = parallelized("dp2xtp2", 4, cluster="auto")
    step(zoo.tokens(120))
    checkpoints = tutti.Checkpoints(root)
    step.save(checkpoints)
    step(zoo.tokens(120, seed=1))  # meanwhile
    folder = checkpoints.wait()
    assert checkpoints.latest(pytest.fail) == folder
    return str(folder)


def read_by_all(folder: str, plan: str) -> tuple[int, int, list[float]]:
    step = parallelized(plan, 4, seed=int(os.environ["RANK"]), cluster="auto")
    count = step.load(folder)
    held_bytes = sum(x.nbytes for x in step.store.parts[0].values())
    return count, held_bytes, [step(zoo.tokens(120, seed=i)).item() for i in (1, 2)]


@pytest.mark.parametrize("plan", [slow("tp4"), slow("zero3"), "pp2xtp2"])
def test_processes_write_together_and_read_what_they_hold(pool, plan, tmp_path):
    folders = set(pool.run(saved_by_all, str(tmp_path)))
    assert len(folders) == 1
    (folder,) = folders
    assert {path.name for path in Path(folder).glob("__*")} == {f"__{rank}_0.distcp" for rank in range(4)}
    alone = parallelized("single", 1)
    alone(zoo.tokens(120))
    expected = [alone(zoo.tokens(120, seed=i)).item() for i in (1, 2)]
    for count, held_bytes, losses in pool.run(read_by_all, folder, plan):
        assert 0 < count <= 1.05 * held_bytes
        assert losses == pytest.approx(expected, rel=1e-5)


def test_the_same_plan_goes_on_bit_for_bit(tmp_path):
    straight, checkpoints = parallelized("dp2xtp2", 4), tutti.Checkpoints(tmp_path)
    straight(zoo.tokens(120))
    straight.save(checkpoints)
    losses = [straight(zoo.tokens(120, seed=i)).item() for i in (1, 2)]
    again = parallelized("dp2xtp2", 4, seed=1)
    again.load(checkpoints.wait())
    assert [again(zoo.tokens(120, seed=i)).item() for i in (1, 2)] == losses


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    step, checkpoints = parallelized("tp2", 2), tutti.Checkpoints(tmp_path)
    step.save(checkpoints)
    folder = checkpoints.wait()
    model = zoo.llama(2)
    other = tutti.parallelize(model, torch.optim.AdamW(model.parameters()), zoo.tokens(), cluster="cpu:1", level="O0")
    before = other.training_state()
    with pytest.raises(ValueError, match="the state does not belong to this model and optimizer: it has"):
        other.load(folder)
    assert same(before, other.training_state())
    with pytest.raises(ValueError, match=r"is no checkpoint: it has no manifest\.json"):
        other.load(tmp_path / "nothing")
