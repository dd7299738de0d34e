import doctest
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.hardware import Cluster, Device, Link, topology
from tutti.hardware.curve import Curve

FAST, MIDDLE, SLOW = Link(100e9, 1e-6), Link(50e9, 5e-6), Link(10e9, 1e-5)
DEVICE = Device("toy", {"float32": 10e12}, 16e9, 1e12)
NODES = Cluster(DEVICE, ((4, FAST), (3, SLOW)))


def test_size_and_total_peak():
    assert NODES.size == 12
    assert NODES.peak(torch.float32) == 12 * 10e12
    assert str(NODES) == "toy:3x4"


@pytest.mark.parametrize(
    ("stride", "size", "link"),
    [
        (1, 1, FAST),
        (1, 2, FAST),
        (2, 2, FAST),
        (1, 4, FAST),
        (4, 3, SLOW),
        (1, 12, SLOW),
        (2, 6, SLOW),
        (1, 3, SLOW),  # 0..2 fits into a node of 4, but 3..5 does not
        (2, 3, SLOW),
    ],
)
def test_slowest_link_of_a_group(stride, size, link):
    assert NODES.link(stride, size) is link


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_slowest_link_equals_the_definition(sizes, stride, size):
    """By enumeration of all groups that tile the cluster: the outermost level at which two members differ."""
    links = [FAST, MIDDLE, SLOW]
    cluster = Cluster(DEVICE, tuple(zip(sizes, links, strict=False)))
    if cluster.size % (stride * size):
        return
    worst = 0
    for block, place in product(range(cluster.size // (stride * size)), range(stride)):
        members = [block * stride * size + place + i * stride for i in range(size)]
        for level in range(len(sizes)):
            inside = 1
            for members_of_level in sizes[:level]:
                inside *= members_of_level
            if len({rank // inside for rank in members}) > 1:
                worst = max(worst, level)
    if size > 1:
        # levels of one member join nothing: any link up to the next real level is as good
        slowest = links.index(cluster.link(stride, size))
        assert slowest == worst or all(sizes[i] == 1 for i in range(min(slowest, worst) + 1, max(slowest, worst) + 1))


def test_group_that_is_too_large():
    with pytest.raises(ValueError, match="no group of 4 ranks 4 apart in toy:3x4 of 12 devices"):
        NODES.link(4, 4)


@pytest.mark.parametrize(
    ("kind", "messages"), [("all_gather", 3), ("reduce_scatter", 3), ("all_reduce", 6), ("all_to_all", 3)]
)
def test_time_is_latency_plus_bytes_over_bandwidth(kind, messages):
    assert NODES.time(kind, 1e9, stride=1, size=4) == pytest.approx(messages * 1e-6 + 1e9 / 100e9)
    assert NODES.time(kind, 1e9, stride=1, size=1) == 0


def test_many_collectives_take_as_many_times_one():
    assert NODES.time("all_reduce", 1e9, 1, 4, messages=10) == pytest.approx(10 * NODES.time("all_reduce", 1e8, 1, 4))


def test_time_of_an_unknown_collective():
    with pytest.raises(
        ValueError,
        match="unknown collective 'gossip'; known are all_gather, reduce_scatter, all_reduce, all_to_all, ppermute",
    ):
        NODES.time("gossip", 1.0, 1, 2)


def test_a_cluster_has_devices():
    with pytest.raises(ValueError, match=r"at least one member each, innermost first, not \[4, 0\]"):
        Cluster(DEVICE, ((4, FAST), (0, SLOW)))


def test_how_a_group_lies_on_the_levels():
    cluster = Cluster(DEVICE, ((4, FAST), (3, MIDDLE), (5, SLOW)))
    lies = {
        (1, 4): [(FAST, 4, 1, 1)],
        (2, 2): [(FAST, 2, 1, 2)],
        (1, 60): [(FAST, 4, 1, 1), (MIDDLE, 3, 4, 1), (SLOW, 5, 12, 1)],
        (2, 30): [(FAST, 2, 1, 2), (MIDDLE, 3, 2, 1), (SLOW, 5, 6, 1)],
        (4, 15): [(MIDDLE, 3, 1, 1), (SLOW, 5, 3, 1)],
        (12, 5): [(SLOW, 5, 1, 1)],
        (1, 1): [],
    }
    for group, expected in lies.items():
        assert [(s.link, s.members, s.within, s.spacing) for s in cluster.stages(*group)] == expected


def test_a_measured_collective_is_taken_as_it_was_measured():
    curve = Curve(((0, 1e-3), (1e6, 2e-3)))
    link = Link(1e9, 1e-4, measured=(("all_gather", 4, curve), ("all_gather", 2, Curve(((0, 1e-4), (1e6, 1e-3))))))
    cluster = Cluster(DEVICE, ((8, link),))
    assert cluster.time("all_gather", 5e5, 1, 4) == pytest.approx(1.5e-3)
    assert cluster.time("all_gather", 5e5, 1, 8) == pytest.approx(1.5e-3 + (7 / 3 - 1) * 1e-3)  # more messages
    assert cluster.time("all_gather", 1e6, 1, 2) == pytest.approx(1e-3)
    assert cluster.time("all_reduce", 1e6, 1, 2) == Cluster(DEVICE, ((8, Link(1e9, 1e-4)),)).time(
        "all_reduce", 1e6, 1, 2
    )


def test_examples():
    assert doctest.testmod(topology).failed == 0


def test_more_of_the_same_devices():
    assert str(Cluster.parse("h100:8").of(16)) == "h100:2x8" and str(Cluster.parse("h100:4").of(2)) == "h100:2"
    small = Cluster.parse("h100:8")
    small = replace(small, device=replace(small.device, memory=1e9))
    assert small.of(24).device.memory == 1e9 and str(small.of(24)) == "h100:3x8"
    own = replace(small, device=replace(small.device, name="mine"))
    assert [n for n, _ in own.of(32).levels] == [32]
    two = Cluster(own.device, (*own.levels, *Cluster.parse("h100:2x8").levels[1:]))
    assert [n for n, _ in two.of(32).levels] == [8, 4]
    with pytest.raises(ValueError, match="12 devices do not fill groups of 8"):
        two.of(12)
    with pytest.raises(ValueError, match="12 devices do not fill nodes of 8"):
        small.of(12)
