"""Reshard: between every two layouts the result is exact, and never more bytes are sent than DTensor sends.

DTensor's bytes are counted from the collectives that its `redistribute` issues for the same pair, on the same
mesh, with a process group that answers at once. Its all-to-all, which CPUs lack, is counted as on GPUs.
"""

from functools import cache
from itertools import permutations, product
from math import prod
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from cases import slow
from tutti.exec.kernels.codegen import generate
from tutti.exec.runtimes.virtual import run_virtual
from tutti.ir.spec import Spec
from tutti.lower.move import move
from tutti.lower.program import Program
from tutti.plan.layouts import layout as ours
from tutti.plan.layouts.layout import Layout, Split, coordinates_of
from tutti.plan.layouts.reshard import ReshardStep, reshard, sent_bytes

MESHES = {"4": {"a": 4}, "2x2": {"a": 2, "b": 2}, "2x3": {"a": 2, "b": 3}, "2x2x2": {"a": 2, "b": 2, "c": 2}}
SMALL = ["4", "2x2", "2x3", slow("2x2x2")]
PLACEMENTS = (ours.R, ours.Partial(), Split(0), Split(1), Split(2))


def shape_for(mesh) -> tuple[int, int, int]:
    """Three different sizes, each divisible by the mesh, the first also by two and three blocks of it."""
    n = prod(mesh.values())
    return 6 * n, n, 2 * n


def plain_layouts(mesh) -> list[Layout]:
    """What DTensor can say: several axes on one dim lie in the order of the mesh, the first outermost."""
    layouts = []
    for placements in product(PLACEMENTS, repeat=len(mesh)):
        outer = {0: 1, 1: 1, 2: 1}
        chosen = {}
        for axis, placement in zip(mesh, placements, strict=True):
            if isinstance(placement, Split):
                placement = Split(placement.dim, outer[placement.dim])
                outer[placement.dim] *= mesh[axis]
            chosen[axis] = placement
        layouts.append(Layout.of(chosen))
    return layouts


def other_layouts(mesh) -> list[Layout]:
    """Any order of the axes on a dim, and splits inside two or three outer blocks."""
    layouts = set()
    for placements in product(PLACEMENTS, repeat=len(mesh)):
        for order, first in product(permutations(mesh), (1, 2, 3)):
            outer = {0: first, 1: 1, 2: 1}
            chosen = dict(zip(mesh, placements, strict=True))
            for axis in order:
                placement = chosen[axis]
                if isinstance(placement, Split):
                    chosen[axis] = Split(placement.dim, outer[placement.dim])
                    outer[placement.dim] *= mesh[axis]
            layouts.add(Layout.of(chosen))
    return sorted(layouts - set(plain_layouts(mesh)), key=str)


class Executor:
    """Carries out steps on all ranks of a mesh, each as the Program that `move` writes for it."""

    def __init__(self, mesh, shape) -> None:
        self.mesh, self.shape = mesh, shape
        self.ranks = range(prod(mesh.values()))
        self.programs = cache(self._programs)

    def _programs(self, step: ReshardStep):
        runs, sent = [], set()
        for rank in self.ranks:
            graph = fx.Graph()
            x = graph.placeholder("x")
            x.meta["val"] = Spec(step.source.local_shape(self.shape, self.mesh), torch.float32)
            y = move(graph, x, step, self.shape, self.mesh, coordinates_of(rank, self.mesh))
            assert tuple(y.meta["val"].shape) == step.target.local_shape(self.shape, self.mesh)
            graph.output((y,))
            runs.append(generate(graph))
            sent.add(Program(graph, self.mesh, rank, {}, {}).sent)
        assert len(sent) == 1
        return runs, sent.pop()

    def __call__(self, steps: list[ReshardStep], parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """What every rank holds after the steps, and the bytes that each sent."""
        total = 0
        for step in steps:
            runs, sent = self.programs(step)
            parts = [y for (y,) in run_virtual(runs, [(part,) for part in parts], self.mesh)]
            total += sent
        return parts, total


def distribute(whole: torch.Tensor, layout: Layout, mesh) -> list[torch.Tensor]:
    """What every rank holds; along partial axes the whole is split into unequal addends."""
    parts = []
    for rank in range(prod(mesh.values())):
        where = coordinates_of(rank, mesh)
        splits = Layout.of(layout.splits)
        part = splits.local_slice(whole, mesh, where).clone()
        weights = [1.0]
        for axis in layout.partials:
            share = [2.0 + i for i in range(mesh[axis] - 1)]
            share.append(1 - sum(share))  # adds up to one, exactly
            weights.append(share[where[axis]])
        parts.append(part * prod(weights))
    return parts


def check(parts: list[torch.Tensor], whole: torch.Tensor, layout: Layout, mesh) -> None:
    """Every rank's part has its place; partial ones add up; replicas are equal."""
    total: dict[tuple, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        where = coordinates_of(rank, mesh)
        key = tuple(where[axis] for axis in mesh if axis not in layout.partials)
        total[key] = total.get(key, torch.zeros_like(part)) + part
    splits = Layout.of(layout.splits)
    for rank in range(len(parts)):
        where = coordinates_of(rank, mesh)
        key = tuple(where[axis] for axis in mesh if axis not in layout.partials)
        assert torch.equal(total[key], splits.local_slice(whole, mesh, where))
    replicated = [axis for axis in mesh if axis not in layout.partials and axis not in layout.splits]
    first: dict[tuple, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        where = coordinates_of(rank, mesh)
        key = tuple(where[axis] for axis in mesh if axis not in replicated)
        assert torch.equal(first.setdefault(key, part), part)


class Counter(TorchDispatchMode):
    """Adds up the bytes that a rank sends in functional collectives."""

    KINDS = {  # noqa: RUF012
        "all_gather_into_tensor": "all_gather",
        "all_reduce": "all_reduce",
        "reduce_scatter_tensor": "reduce_scatter",
    }

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional":
            name = function.overloadpacket.__name__
            if name in self.KINDS:
                self.sent += sent_bytes(self.KINDS[name], args[0].nbytes, _members(args[-1]))
            else:
                assert name in ("wait_tensor", "_wrap_tensor_autograd"), f"not counted: {name}"
        return function(*args, **(kwargs or {}))


def _members(group) -> int:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    return dist.get_world_size(group)


@pytest.fixture
def bytes_of_dtensor(monkeypatch, request):
    """A function of (source, target): bytes that DTensor sends, None where it cannot."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = MESHES[request.getfixturevalue("mesh")]
    counter = Counter()

    def all_to_all(x, gather_dim, shard_dim, device_mesh, mesh_dim):
        counter.sent += sent_bytes("all_to_all", x.nbytes, k := device_mesh.size(mesh_dim))
        shape = list(x.shape)
        shape[gather_dim] *= k
        shape[shard_dim] //= k
        return x.new_empty(shape)

    monkeypatch.setattr("torch.distributed.tensor.placement_types.shard_dim_alltoall", all_to_all)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(mesh.values()))
    device_mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(*mesh.values()))
    shape = shape_for(mesh)

    def placements(layout: Layout) -> list:
        kinds = {Split: lambda p: Shard(p.dim), ours.Partial: lambda p: Partial()}
        return [kinds.get(type(layout[axis]), lambda p: Replicate())(layout[axis]) for axis in mesh]

    def measure(source: Layout, target: Layout) -> int | None:
        local = torch.zeros(source.local_shape(shape, mesh))
        tensor = DTensor.from_local(local, device_mesh, placements(source), run_check=False)
        counter.sent = 0
        try:
            with counter:
                moved = tensor.redistribute(device_mesh, placements(target)).to_local()
        except RuntimeError:
            return None
        assert moved.shape == target.local_shape(shape, mesh)
        return counter.sent

    yield measure
    dist.destroy_process_group()


def pairs_of(sources: list[Layout], targets: list[Layout], most: int) -> list[tuple[Layout, Layout]]:
    pairs = list(product(sources, targets))
    return pairs if len(pairs) <= most else Random(0).sample(pairs, most)


def run_pairs(mesh, pairs, bytes_of_dtensor=None) -> dict[str, int]:
    """Check every pair; how many sent fewer bytes than DTensor, as many, or what it cannot do."""
    shape = shape_for(mesh)
    whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    execute = Executor(mesh, shape)
    counts = {"fewer": 0, "equal": 0, "only ours": 0}
    for source, target in pairs:
        steps = reshard(source, target, shape, mesh)
        parts, sent = execute(steps, distribute(whole, source, mesh))
        check(parts, whole, target, mesh)
        assert sent == sum(step.sent(shape, 4, mesh) for step in steps)
        if bytes_of_dtensor is not None:
            theirs = bytes_of_dtensor(source, target)
            assert theirs is None or sent <= theirs, f"{source} -> {target}: {sent} bytes, DTensor {theirs}"
            counts["only ours" if theirs is None else "equal" if sent == theirs else "fewer"] += 1
    return counts


@pytest.mark.parametrize("mesh", SMALL)
def test_every_pair_is_exact_and_sends_no_more_than_dtensor(mesh, bytes_of_dtensor):
    layouts = plain_layouts(MESHES[mesh])
    counts = run_pairs(MESHES[mesh], pairs_of(layouts, layouts, 625), bytes_of_dtensor)
    assert sum(counts.values()) == min(len(layouts) ** 2, 625)
    assert (counts["fewer"] > 0) == (len(MESHES[mesh]) > 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x2x2"])
def test_all_pairs_on_three_axes(mesh, bytes_of_dtensor):
    layouts = plain_layouts(MESHES[mesh])
    counts = run_pairs(MESHES[mesh], list(product(layouts, layouts)), bytes_of_dtensor)
    assert sum(counts.values()) == 125 * 125


@pytest.mark.parametrize("mesh", SMALL)
def test_strided_and_reordered_layouts_are_exact(mesh):
    plain, other = plain_layouts(MESHES[mesh]), other_layouts(MESHES[mesh])
    for sources, targets in ((plain, other), (other, plain), (other, other)):
        run_pairs(MESHES[mesh], pairs_of(sources, targets, 120))
