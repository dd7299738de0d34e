"""Which calls become one kernel at O2, and what it reads, writes and keeps."""

from __future__ import annotations

import torch

from programs import program
from tutti.analysis.kernels import fuse
from tutti.analysis.memory import memory
from tutti.analysis.prices import moved
from tutti.analysis.replay import replay
from tutti.hardware import Cluster
from tutti.lower.collectives import all_reduce
from tutti.sim.simulate import simulate

aten = torch.ops.aten
N = 64 * 64 * 4  # bytes of a square


def kernels(build, inputs, mesh=None):
    """The labels of what runs together."""
    played = fuse(replay(program(build, inputs, mesh or {"dp": 1})), "O2")
    return [[n.meta["label"] for n in event.nodes] for event in played.events if event.computes or event.collective]


def square(calls, target, *args, label):
    return calls(target, args, (64, 64), label=label)


def chain(calls, x):
    a = square(calls, aten.neg.default, x, label="a")
    b = square(calls, aten.exp.default, a, label="b")
    return (square(calls, aten.mul.Tensor, b, x, label="c"),)


def test_a_chain_of_elementwise_calls_reads_once_and_writes_once():
    assert kernels(chain, {"batch:x": (64, 64)}) == [["a", "b", "c"]]
    played = replay(program(chain, {"batch:x": (64, 64)}, {"dp": 1}))
    (kernel,) = fuse(played, "O2").events
    assert moved(kernel) == 2 * N and sum(map(moved, played.events)) == 7 * N
    assert memory(fuse(played, "O2")).peak == 2 * N and memory(played).peak == 3 * N
    device = Cluster.parse("h100:1").device
    simulation = simulate([played.program], Cluster.parse("h100:1"), "O2")
    assert simulation.seconds == 2 * N / device.reached + device.overhead


def test_a_product_parts_what_it_lies_between():
    def build(calls, x):
        a = square(calls, aten.neg.default, x, label="a")
        p = square(calls, aten.mm.default, a, x, label="product")
        b = square(calls, aten.exp.default, p, label="b")
        c = square(calls, aten.add.Tensor, b, a, label="c")  # reads both sides
        return (c,)

    assert kernels(build, {"batch:x": (64, 64)}) == [["a"], ["product"], ["b", "c"]]


def test_views_in_between_do_not_part():
    def build(calls, x):
        a = square(calls, aten.neg.default, x, label="a")
        v = square(calls, aten.t.default, a, label="v")
        b = square(calls, aten.exp.default, v, label="b")
        return (square(calls, aten.neg.default, b, label="c"),)

    assert kernels(build, {"batch:x": (64, 64)}) == [["a", "b", "c"]]


def test_reductions_of_rows_go_on_and_those_of_all_do_not():
    def build(whole):
        def norm(calls, x):
            a = square(calls, aten.mul.Tensor, x, x, label="squares")
            if whole:
                s = calls(aten.sum.default, (a,), (), label="sum")
            else:
                s = calls(aten.mean.dim, (a, [-1], True), (64, 1), label="mean")
            return (square(calls, aten.div.Tensor, x, s, label="divided"),)

        return norm

    assert kernels(build(False), {"batch:x": (64, 64)}) == [["squares", "mean", "divided"]]
    assert kernels(build(True), {"batch:x": (64, 64)}) == [["squares", "sum"], ["divided"]]


def test_nothing_fuses_over_a_collective():
    def build(calls, x):
        a = square(calls, aten.neg.default, x, label="a")
        b = square(calls, aten.exp.default, a, label="b")
        b2 = square(calls, aten.neg.default, b, label="b2")
        r = calls(all_reduce, (b2, "dp", "sum"), (64, 64), label="r")
        c = square(calls, aten.neg.default, r, label="c")
        return (square(calls, aten.exp.default, c, label="two are not compiled"),)

    expected = [["a", "b", "b2"], ["r"], ["c"], ["two are not compiled"]]
    assert kernels(build, {"batch:x": (64, 64)}, {"dp": 2}) == expected


def test_siblings_that_read_the_same_are_one():
    def build(calls, x, y):
        p = square(calls, aten.mm.default, x, y, label="p")
        a = square(calls, aten.neg.default, p, label="a")
        b = square(calls, aten.exp.default, p, label="b")
        return (a, b)

    assert kernels(build, {"batch:x": (64, 64), "param:y": (64, 64)}) == [["p"], ["a", "b"]]
