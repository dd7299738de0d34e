import doctest
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.cluster import Cluster, Device, Link, topology

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
        found = links.index(cluster.link(stride, size))
        assert found == worst or all(sizes[i] == 1 for i in range(min(found, worst) + 1, max(found, worst) + 1))


def test_group_that_is_too_large():
    with pytest.raises(ValueError, match="no group of 4 ranks 4 apart in toy:3x4 of 12 devices"):
        NODES.link(4, 4)


@pytest.mark.parametrize(
    ("kind", "messages"), [("all_gather", 3), ("reduce_scatter", 3), ("all_reduce", 6), ("all_to_all", 3)]
)
def test_time_is_latency_plus_bytes_over_bandwidth(kind, messages):
    assert NODES.time(kind, 1e9, stride=1, size=4) == pytest.approx(messages * 1e-6 + 1e9 / 100e9)
    assert NODES.time(kind, 1e9, stride=1, size=1) == 0


def test_time_of_an_unknown_collective():
    with pytest.raises(ValueError, match="no collective 'gossip'; known are all_gather, reduce_scatter"):
        NODES.time("gossip", 1.0, 1, 2)


@pytest.mark.parametrize("cluster", [NODES, Cluster.parse("h100:16x8"), Cluster.parse("cpu:3")], ids=str)
def test_json_round_trip(cluster):
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster and hash(again) == hash(cluster)


def test_json_of_something_else():
    with pytest.raises(ValueError, match="not a cluster: 'levels'"):
        Cluster.from_json('{"device": {}}')
    with pytest.raises(ValueError, match=r"not a cluster: .*colour"):
        Cluster.from_json('{"device": {"colour": 1}, "levels": []}')


def test_a_cluster_has_devices():
    with pytest.raises(ValueError, match=r"at least one member each, innermost first, not \[4, 0\]"):
        Cluster(DEVICE, ((4, FAST), (0, SLOW)))


def test_examples():
    assert doctest.testmod(topology).failed == 0
