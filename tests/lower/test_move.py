"""Every step of a reshard as a program: local operators around one collective."""

from math import prod

import pytest
import torch
from torch import fx

from tutti.exec.kernels.codegen import generate
from tutti.exec.runtimes.virtual import run_virtual
from tutti.ir.spec import Spec
from tutti.lower.move import move
from tutti.plan.layouts.layout import Layout, Partial, R, Split, coordinates_of
from tutti.plan.layouts.reshard import ReshardStep, possible

MESH, SHAPE = {"a": 2, "b": 3}, (12, 6)


def moved(kind, axis, source, target, shape=SHAPE):
    """(parts after the step on all ranks, operators of rank 0)."""
    source, target = Layout.of(source), Layout.of(target)
    step, whole = ReshardStep(kind, axis, source, target), torch.arange(float(prod(shape))).view(shape)
    assert possible(step, shape, MESH)
    runs, inputs, targets = [], [], []
    for rank in range(6):
        where, graph = coordinates_of(rank, MESH), fx.Graph()
        x = graph.placeholder("x")
        x.meta = {
            "val": Spec(source.local_shape(shape, MESH, where), torch.float32),
            "phase": "forward",
            "label": "here",
        }
        y = move(graph, x, step, shape, MESH, where)
        assert y.meta["val"].shape == target.local_shape(shape, MESH, where) and y.meta["label"] == "here"
        graph.output((y,))
        runs.append(generate(graph))
        inputs.append((source.local_slice(whole, MESH, where).clone(),))
        targets.append([str(n.target) for n in graph.nodes if n.op == "call_function"])
    parts = [y for (y,) in run_virtual(runs, inputs, MESH)]
    assert torch.equal(target.assemble(parts, shape, MESH), whole)
    assert all(other == targets[0] for other in targets) or kind == "mask"
    return parts, targets[0]


@pytest.mark.parametrize(
    ("kind", "source", "target", "operators"),
    [
        ("slice", {}, {"b": Split(0)}, ["aten.slice.Tensor"]),
        ("slice", {}, {"b": Split(0, 2)}, ["aten.select.int"]),
        ("all_reduce", {"b": Partial()}, {}, ["tutti.all_reduce.default"]),
        ("all_gather", {"b": Split(0)}, {}, ["tutti.all_gather.default"]),
        ("reduce_scatter", {"b": Partial()}, {"b": Split(0)}, ["tutti.reduce_scatter.default"]),
        ("mask", {}, {"b": Partial()}, ["aten.clamp.default"]),
    ],
)
def test_leading_dims_need_no_copies(kind, source, target, operators):
    names = moved(kind, "b", source, target)[1]
    free = ("aten.reshape.default", "aten.permute.default")  # what they move here has size one
    assert [name for name in names if name not in free] == operators


@pytest.mark.parametrize("old", [Split(0), Split(1), Split(0, 2), Split(1, 2)])
@pytest.mark.parametrize("new", [Split(0), Split(1), Split(0, 2), Split(1, 2)])
def test_all_to_all_between_any_two_dims(old, new):
    if old.dim != new.dim:
        moved("all_to_all", "b", {"b": old}, {"b": new})


@pytest.mark.parametrize("place", [Split(0), Split(0, 2), Split(1), Split(1, 2)])
def test_beside_another_axis(place):
    other = {"a": Split(0)} if place != Split(0) else {"a": Split(0, 3)}
    moved("all_gather", "b", {**other, "b": place}, other)
    moved("slice", "b", other, {**other, "b": place})
    moved("reduce_scatter", "b", {**other, "b": Partial()}, {**other, "b": place})


def test_masked_ranks_hold_zeros():
    parts, _ = moved("mask", "b", {"b": R}, {"b": Partial()})
    assert [bool(part.any()) for part in parts] == [True, False, False, True, False, False]


UNEVEN = [Split(0, 1, 1), Split(0, 1, 2), Split(0, 2, 1), Split(1, 1, 1), Split(1, 2, 1)]


@pytest.mark.parametrize("place", UNEVEN)
def test_uneven_parts(place):
    shape = (20, 14)
    moved("all_gather", "b", {"b": place}, {}, shape)
    moved("slice", "b", {}, {"b": place}, shape)
    moved("reduce_scatter", "b", {"b": Partial()}, {"b": place}, shape)
    for other in UNEVEN:
        if other.dim != place.dim:
            moved("all_to_all", "b", {"b": place}, {"b": other}, shape)
            moved("all_to_all", "b", {"b": place, "a": Split(2, 1, 1)}, {"b": other, "a": Split(2, 1, 1)}, (*shape, 5))


@pytest.mark.parametrize("unit", [1, 3])
def test_parts_of_uneven_parts(unit):
    other, both = {"a": Split(0, 1, unit)}, {"a": Split(0, 1, unit), "b": Split(0, 2, unit)}
    shape = (13 * unit, 4)
    moved("all_gather", "b", both, other, shape)
    moved("slice", "b", other, both, shape)
    moved("reduce_scatter", "b", {**other, "b": Partial()}, both, shape)
    moved("all_to_all", "b", {**other, "b": Split(1, 1, 1)}, both, shape)
    inside = ReshardStep("all_gather", "a", Layout.of(both), Layout.of({"b": Split(0, 2, unit)}))
    assert not possible(inside, shape, MESH), "the inner axis is gathered first"
