"""Prices of calls whose cost their name and bytes alone do not tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from programs import program
from tutti.analysis.prices import Prices, moved
from tutti.analysis.replay import Event, replay
from tutti.hardware import Cluster, Device
from tutti.hardware.curve import Curve
from tutti.hardware.device import FAMILIES, Link
from tutti.ops.create import PASSES

aten = torch.ops.aten
RATES = {family: 1 + i for i, family in enumerate(FAMILIES)}  # seconds a byte
STREAMS = {f"{family} float32": Curve(((0.0, 0.0), (1.0, float(rate)))) for family, rate in RATES.items()}
CPU = Cluster(Device("cpu", {"float32": 100.0}, 1e9, 1e30, streams=STREAMS), ((1, Link(1e9, 0.0)),))
GPU = replace(CPU, device=replace(CPU.device, name="gpu"))


def last(build, inputs, dtype=torch.float32) -> tuple[Event, float, float]:
    """The last call of a Program, and what it costs on the CPU and on the GPU."""
    lowered = program(build, inputs, {"dp": 1}, dtype=dtype)
    event = replay(lowered).events[-1]
    return event, Prices(CPU, lowered).compute(event), Prices(GPU, lowered).compute(event)


def copied(view, args, shape):
    def build(calls, x):
        return (calls(aten.clone.default, (calls(view, (x, *args), shape),), shape),)

    return build


@pytest.mark.parametrize(
    ("view", "args", "shape", "family"),
    [
        (aten.transpose.int, (1, 2), (2, 5, 4, 8), "add"),  # rows of heads
        (aten.transpose.int, (2, 3), (2, 4, 8, 5), "transpose"),
        (aten.expand.default, ([2, 4, 5, 8],), (2, 4, 5, 8), "add"),
    ],
)
def test_copies_go_by_how_their_operand_lies(view, args, shape, family):
    _, taken, _ = last(copied(view, args, shape), {"batch:x": (2, 4, 5, 8)})
    if view is not aten.expand.default:
        contiguous = torch.contiguous_format
        assert contiguous  # the default keeps strides: a clone of a dense view is as fast as memory
    assert taken == pytest.approx(2 * 320 * 4 * RATES[family])


def test_bools_are_converted_as_they_are_made():
    def build(calls, x):
        return (calls(aten._to_copy.default, (x,), (64,)),)

    lowered = program(build, {"batch:x": (64,)}, {"dp": 1}, dtype=torch.bool)
    node = next(n for n in lowered.graph.nodes if n.op == "call_function")
    node.kwargs = {"dtype": torch.float32}
    (event,) = replay(lowered).events
    assert Prices(CPU, lowered).compute(event) == pytest.approx(64 * 5 * RATES["compare"])


def test_a_pool_looks_at_what_its_windows_cover():
    def build(calls, x):
        return (calls(aten.max_pool2d_with_indices.default, (x, [3, 3], [2, 2], [1, 1]), (1, 2, 4, 4)),)

    event, taken, _ = last(build, {"batch:x": (1, 2, 8, 8)})
    assert event.outputs[0].bytes == 4 * 2 * 4 * 4
    assert taken == pytest.approx(event.outputs[0].bytes * 9 * RATES["pool"])


def test_a_look_up_reads_as_much_of_a_table_as_it_returns():
    def build(calls, table, indices):
        return (calls(aten.embedding.default, (table, indices), (6, 8)),)

    lowered = program(build, {"param:table": (100, 8), "batch:i": (6,)}, {"dp": 1})
    node = next(n for n in lowered.graph.nodes if n.name.startswith("batch_i"))
    node.meta["val"] = replace(node.meta["val"], dtype=torch.int64)
    (event,) = replay(lowered).events
    assert moved(event) == 6 * 8 + 2 * 6 * 8 * 4  # indices; rows that are read and written


def test_the_gradient_of_a_table_is_zeros_and_the_rows_that_are_added():
    def build(calls, grad, indices):
        return (calls(aten.embedding_dense_backward.default, (grad, indices, 100, -1, False), (100, 8)),)

    lowered = program(build, {"batch:grad": (6, 8), "batch:i": (6,)}, {"dp": 1})
    node = next(n for n in lowered.graph.nodes if n.name.startswith("batch_i"))
    node.meta["val"] = replace(node.meta["val"], dtype=torch.int64)
    (event,) = replay(lowered).events
    expected = 100 * 8 * 4 * RATES["add"] + 3 * 6 * 8 * 4 * RATES["table"]
    assert Prices(CPU, lowered).compute(event) == pytest.approx(expected)


@pytest.mark.parametrize(("channels", "filled"), [(16, 1.0), (3, 16 / 3), (17, 32 / 17)])
def test_channels_that_do_not_fill_the_lanes_of_a_cpu_cost_as_if_they_did(channels, filled):
    def build(calls, x, w):
        arguments = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return (calls(aten.convolution.default, arguments, (1, channels, 8, 8)),)

    _, on_cpu, on_gpu = last(build, {"batch:x": (1, 3, 8, 8), "param:w": (channels, 3, 3, 3)})
    assert on_gpu == pytest.approx(2 * 3 * 9 * channels * 64 / 100.0)
    assert on_cpu == pytest.approx(filled * on_gpu)


def test_random_numbers_are_drawn_in_passes():
    assert PASSES > 1
