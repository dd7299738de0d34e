"""Any tensor from any layout on any mesh to any other, through files, of which each rank reads what it holds."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tutti.checkpoint.copies import copies
from tutti.checkpoint.reader import CheckpointReader
from tutti.checkpoint.write import write
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.ir.spec import Spec
from tutti.plan.layouts.layout import Layout, Split, coordinates_of, devices

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def mesh_of(count: int) -> dict[str, int]:
    """So many devices on one or two axes."""
    first = random.choice([n for n in range(1, count + 1) if count % n == 0])
    return {"a": first, "b": count // first}


def layout_of(shape: tuple[int, ...], mesh: dict[str, int]) -> Layout:
    """One that the shape can lie in, strided ones too."""
    for _ in range(20):
        splits = {
            axis: Split(random.randrange(len(shape)), random.choice((1, 1, 2, 3, 4)))
            for axis in mesh if shape and random.random() < 0.7
        }  # fmt: skip
        layout = Layout.of(splits)
        if layout.fits(shape, mesh):
            return layout
    return Layout()


def parts_of(whole: torch.Tensor, layout: Layout, mesh: dict[str, int]) -> dict[int, torch.Tensor]:
    return {r: layout.local_slice(whole, mesh, coordinates_of(r, mesh)).clone() for r in range(devices(mesh))}


def some_tensors() -> dict[str, torch.Tensor]:
    shapes = [tuple(random.choice((1, 4, 6, 12, 30, 60)) for _ in range(random.randint(0, 3))) for _ in range(6)]
    return {f"tensor {i}": (torch.randn(s) * 9).to(random.choice(DTYPES)) for i, s in enumerate(shapes)}


def shards_of_rank(tensors: dict[str, torch.Tensor], mesh: dict[str, int]) -> dict[str, ShardedTensor]:
    laid = {name: layout_of(tuple(whole.shape), mesh) for name, whole in tensors.items()}
    return {name: ShardedTensor(Spec.of(whole), laid[name], mesh, parts_of(whole, laid[name], mesh), i)
            for i, (name, whole) in enumerate(tensors.items())}  # fmt: skip


@pytest.fixture
def saved(tmp_path) -> tuple[dict[str, torch.Tensor], Path]:
    random.seed(0)
    torch.manual_seed(0)
    tensors = some_tensors()
    write(tmp_path / "c", copies(shards_of_rank(tensors, {"a": 2, "b": 3})))
    return tensors, tmp_path / "c"


@pytest.mark.parametrize("seed", range(25))
def test_any_layout_becomes_any_other_bit_for_bit(seed, tmp_path):
    random.seed(seed)
    torch.manual_seed(seed)
    before, after = mesh_of(random.randint(1, 12)), mesh_of(random.randint(1, 12))
    tensors = some_tensors()
    write(tmp_path, copies(shards_of_rank(tensors, before)))
    blocks = [x for _, blocks in copies(shards_of_rank(tensors, before)).values() for x in blocks.values()]
    assert sum(x.nbytes for x in blocks) == sum(x.nbytes for x in tensors.values()), "each byte once"
    layouts = {name: layout_of(tuple(whole.shape), after) for name, whole in tensors.items()}
    for rank in range(devices(after)):
        expected = {name: parts_of(whole, layouts[name], after)[rank] for name, whole in tensors.items()}
        mine = {name: torch.zeros_like(part) for name, part in expected.items()}
        stored = CheckpointReader(tmp_path)
        stored.load(
            {name: ShardedTensor(Spec.of(tensors[name]), layouts[name], after, {rank: mine[name]}) for name in tensors}
        )
        assert stored.bytes == sum(part.nbytes for part in expected.values()), "what it holds, and no more"
        assert all(torch.equal(mine[name], expected[name]) for name in tensors)


def test_ranks_of_one_process_that_hold_the_same_read_it_once(saved):
    tensors, folder = saved
    mesh, name = {"a": 4}, "tensor 0"
    parts = {rank: torch.zeros_like(tensors[name]) for rank in range(4)}
    stored = CheckpointReader(folder)
    stored.load({name: ShardedTensor(Spec.of(tensors[name]), Layout(), mesh, parts)})
    assert stored.bytes == tensors[name].nbytes
    assert all(torch.equal(part, tensors[name]) for part in parts.values())


def test_torch_reads_the_same_files(saved):
    tensors, folder = saved
    mine = {name: torch.zeros_like(whole) for name, whole in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        dcp.load(mine, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(mine[name], whole) for name, whole in tensors.items())
    stored = CheckpointReader(folder)
    assert all(torch.equal(stored.whole(name), whole) for name, whole in tensors.items())


def test_copies_lie_in_the_memory_of_earlier_ones(saved):
    tensors, _ = saved
    first = copies({name: ShardedTensor.whole(whole) for name, whole in tensors.items()})
    memory = [x.data_ptr() for _, blocks in first.values() for x in blocks.values()]
    for whole in tensors.values():
        whole.fill_(1)
    again = copies({name: ShardedTensor.whole(whole) for name, whole in tensors.items()}, first)
    parts = [x for _, blocks in again.values() for x in blocks.values()]
    assert [x.data_ptr() for x in parts] == memory and all(x.all() for x in parts)


@pytest.mark.parametrize(("name", "shape", "dtype", "message"), [
    ("tensor 9", (3,), torch.float32, "has no tensor 'tensor 9'"),
    ("tensor 0", (77,), torch.float32, "is expected"),
])  # fmt: skip
def test_what_is_not_there_is_said_before_anything_is_read(saved, name, shape, dtype, message):
    tensors, folder = saved
    good = torch.zeros_like(tensors["tensor 1"])
    bad = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        CheckpointReader(folder).load({"tensor 1": ShardedTensor.whole(good), name: ShardedTensor.whole(bad)})
    assert not good.any()
