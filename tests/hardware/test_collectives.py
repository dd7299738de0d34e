"""Costs of collectives against closed forms."""

from itertools import pairwise
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.hardware import Cluster, Device, Link
from tutti.hardware.collectives import ALGORITHMS, MESSAGES
from tutti.hardware.device import Way

DEVICE = Device("toy", {"float32": 10e12}, 16e9, 1e12)
N = 1e9  # bytes in the buffer
FAST, SLOW = Link(100e9, 1e-6), Link(10e9, 1e-5)


def cluster(*levels) -> Cluster:
    return Cluster(DEVICE, levels)


def sent(kind: str, k: int, buffer: float = N) -> float:
    """Bytes that each rank sends in a ring; the buffer is the whole: of an all-gather the output."""
    return {"all_reduce": 2 * (k - 1) / k, "ppermute": 1.0}.get(kind, (k - 1) / k) * buffer


def line(on: Cluster, name: str, kind: str, stride: int, k: int):
    return next(candidate for candidate in on.lines(kind, stride, k) if candidate.name == name)


def seconds(on: Cluster, name: str, kind: str, stride: int, k: int) -> float:
    return line(on, name, kind, stride, k).seconds(sent(kind, k))


@pytest.mark.parametrize("k", [2, 7, 8, 12, 1000])
def test_a_ring_sends_what_patarasuk_and_yuan_prove_least(k):
    on = cluster((k, FAST))
    assert seconds(on, "ring", "all_reduce", 1, k) == pytest.approx(2 * (k - 1) * 1e-6 + 2 * (k - 1) / k * N / 100e9)
    for kind in ("all_gather", "reduce_scatter"):
        assert seconds(on, "ring", kind, 1, k) == pytest.approx((k - 1) * 1e-6 + (k - 1) / k * N / 100e9)
    assert seconds(on, "pairwise", "all_to_all", 1, k) == pytest.approx((k - 1) * 1e-6 + (k - 1) / k * N / 100e9)
    assert seconds(on, "direct", "ppermute", 1, k) == pytest.approx(1e-6 + N / 100e9)


@pytest.mark.parametrize("nodes", [2, 7, 12, 1000])
def test_a_tree_has_logarithmic_latency_between_nodes_and_a_chain_inside(nodes):
    on = cluster((4, FAST), (nodes, SLOW))
    hops = 3 * 1e-6 + ceil(log2(nodes)) * 1e-5
    assert line(on, "tree", "all_reduce", 1, 4 * nodes).fixed == pytest.approx(2 * hops)
    assert line(on, "tree", "all_reduce", 4, nodes).fixed == pytest.approx(2 * ceil(log2(nodes)) * 1e-5)
    assert seconds(on, "tree", "all_reduce", 4, nodes) - 2 * ceil(log2(nodes)) * 1e-5 == pytest.approx(2 * N / 10e9)


def test_small_all_reduces_go_by_tree_and_large_ones_by_ring():
    on = cluster((64, FAST), (64, SLOW))
    costs = {name: line(on, name, "all_reduce", 64, 64) for name in ("ring", "tree")}
    for buffer, cheapest in ((1e3, "tree"), (1e9, "ring")):
        sends = sent("all_reduce", 64, buffer)
        assert on.time("all_reduce", sends, 64, 64) == costs[cheapest].seconds(sends)
        assert costs[cheapest].seconds(sends) == min(c.seconds(sends) for c in costs.values())


@pytest.mark.parametrize(("inside", "nodes"), [(8, 16), (7, 3), (4, 1000)])
def test_levels_are_gone_through_one_by_one(inside, nodes):
    """Reduce-scatter inside a node, all-reduce of a part between nodes, all-gather inside."""
    on, k = cluster((inside, FAST), (nodes, SLOW)), inside * nodes
    in_node = (inside - 1) * 1e-6 + (inside - 1) / inside * N / 100e9
    between = (nodes - 1) * 1e-5 + (nodes - 1) / nodes * (N / inside) / 10e9
    assert seconds(on, "hierarchical", "all_reduce", 1, k) == pytest.approx(2 * in_node + 2 * between)
    assert seconds(on, "hierarchical", "all_gather", 1, k) == pytest.approx(in_node + between)


def test_a_ring_over_nodes_uses_the_rails_of_all_its_ranks():
    on = cluster((8, FAST), (16, SLOW))
    whole = line(on, "ring", "all_reduce", 1, 128)
    assert whole.per_byte == pytest.approx(1 / (8 * 10e9))
    assert whole.fixed == pytest.approx(2 * (112 * 1e-6 + 15 * 1e-5))
    half = line(on, "ring", "all_reduce", 2, 64)  # every second rank
    assert half.per_byte == pytest.approx(1 / (4 * 10e9))


def test_groups_with_rails_do_not_meet_and_on_a_shared_port_they_do():
    rails = cluster((8, FAST), (16, SLOW))
    shared = cluster((8, FAST), (16, Link(10e9, 1e-5, ports=1)))
    assert line(rails, "ring", "all_reduce", 8, 16).per_byte == pytest.approx(1 / 10e9)
    assert line(shared, "ring", "all_reduce", 8, 16).per_byte == pytest.approx(8 / 10e9)  # eight groups at once
    assert line(shared, "ring", "all_reduce", 1, 128).per_byte == pytest.approx(1 / 10e9)  # one ring, out once
    assert line(rails, "direct", "ppermute", 1, 128).per_byte == pytest.approx(1 / 10e9)  # one rank of a node sends out
    assert line(shared, "direct", "ppermute", 8, 16).per_byte == pytest.approx(8 / 10e9)


def test_an_oversubscribed_tree_carries_less():
    full = cluster((8, FAST), (4, SLOW), (4, SLOW))
    thin = cluster((8, FAST), (4, SLOW), (4, Link(10e9, 1e-5, oversubscription=3)))
    for kind in MESSAGES:
        assert thin.time(kind, N, 32, 4) == pytest.approx(3 * full.time(kind, N, 32, 4), rel=1e-3)
        assert thin.time(kind, N, 8, 4) == full.time(kind, N, 8, 4)


def test_an_all_to_all_sends_between_nodes_what_is_meant_for_them():
    on = cluster((8, FAST), (4, SLOW))
    assert seconds(on, "pairwise", "all_to_all", 1, 32) == pytest.approx(7e-6 + 24e-5 + 24 / 32 * N / 10e9)


def test_a_torus_uses_the_rings_of_all_its_dims_at_once():
    ring = Link(20e9, 1e-6, kind="ring")
    on = cluster((4, ring), (6, ring), (5, ring))
    torus = line(on, "hierarchical", "all_reduce", 1, 120)
    assert torus.fixed == pytest.approx(2 * (3 + 5 + 4) * 1e-6)
    assert seconds(on, "hierarchical", "all_reduce", 1, 120) - torus.fixed == pytest.approx(2 * 119 / 120 * N / 60e9)
    one = line(on, "hierarchical", "all_gather", 4, 6)  # along one dim
    assert one.per_byte == pytest.approx(1 / 20e9)


@pytest.mark.parametrize("members", [2, 5, 8])
def test_an_all_to_all_in_a_ring_goes_the_shorter_way(members):
    on = cluster((members, Link(20e9, 0.0, kind="ring")))
    hops = sum(min(i, members - i) for i in range(members)) / members
    assert seconds(on, "pairwise", "all_to_all", 1, members) == pytest.approx(N * hops / 20e9)


def test_groups_inside_a_ring_share_its_links():
    on = cluster((8, Link(20e9, 0.0, kind="ring")))
    per_byte = {
        (s, k): line(on, "ring", "all_gather", s, k).per_byte * 20e9 for s, k in ((1, 8), (1, 4), (2, 4), (2, 2))
    }
    assert per_byte == pytest.approx({(1, 8): 1, (1, 4): 2, (2, 4): 2, (2, 2): 4})


def test_in_a_mesh_a_group_has_only_the_links_between_its_own():
    on = cluster((8, Link(70e9, 0.0, kind="mesh")))
    assert line(on, "ring", "all_gather", 1, 8).per_byte == pytest.approx(1 / 70e9)
    assert line(on, "ring", "all_gather", 1, 4).per_byte == pytest.approx(1 / 30e9)
    assert line(on, "direct", "ppermute", 1, 8).per_byte == pytest.approx(1 / 10e9)


def test_a_backend_has_only_its_own_ways():
    gloo = cluster((4, Link(1e9, 1e-4, ways=(Way("ring", "", 1e-3, 1e-4, 0.5),))))
    assert [x.name for x in gloo.lines("all_reduce", 1, 4)] == ["ring"]
    assert gloo.time("all_reduce", 1e9, 1, 4) == pytest.approx(1e-3 + 6e-4 + 2.0)
    nccl = Cluster.parse("h100:2x8")
    assert [x.name for x in nccl.lines("all_reduce", 1, 16)] == [
        f"{way} {protocol}" for way in ("ring", "tree") for protocol in ("LL", "LL128", "Simple")
    ]


def test_nccl_s_all_reduce_on_eight_h100():
    """Small: LL, 6.6 us and 14 messages of 0.6 us. Large: 370 GB/s of bus bandwidth (topo.h)."""
    on = Cluster.parse("h100:8")
    assert on.time("all_reduce", 0, 1, 8) == pytest.approx(6.6e-6 + 14 * 0.6e-6)
    assert sent("all_reduce", 8, 8e9) / on.time("all_reduce", sent("all_reduce", 8, 8e9), 1, 8) == pytest.approx(
        450e9 * 0.824, rel=0.01
    )


@pytest.mark.parametrize("kind", MESSAGES)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    shapes=st.lists(st.sampled_from(["switch", "ring", "mesh"]), min_size=3, max_size=3),
    stride=st.integers(1, 16),
    size=st.integers(2, 16),
    counts=st.lists(st.floats(0, 1e12), min_size=2, max_size=4),
)
def test_any_group_has_a_price_that_does_not_fall_with_bytes(kind, sizes, shapes, stride, size, counts):
    links = [Link(100e9 / 10**i, 1e-6, kind=s, ports=i) for i, s in enumerate(shapes)]
    on = cluster(*zip(sizes, links, strict=False))
    if stride * size > on.size:
        return
    times = [on.time(kind, count, stride, size) for count in sorted(counts)]
    assert all(0 < a <= b for a, b in pairwise(times))


@pytest.mark.parametrize("kind", MESSAGES)
def test_slower_links_cost_more(kind):
    times = [cluster((7, FAST), (12, Link(b, lat))).time(kind, N, 1, 84)
             for b, lat in ((10e9, 1e-5), (5e9, 1e-5), (5e9, 1e-4))]  # fmt: skip
    assert times == sorted(set(times))


def test_every_collective_has_an_algorithm():
    assert set(ALGORITHMS) == set(MESSAGES)


def test_groups_that_lie_askew_share_the_ports_of_a_unit():
    on = cluster((4, FAST), (3, SLOW))
    assert line(on, "ring", "all_gather", 1, 3).per_byte == pytest.approx(1 / 20e9)  # 3 | 4 5 | 6 7 8: two leave a node
    assert line(on, "ring", "all_gather", 2, 3).per_byte == pytest.approx(1 / 10e9)
    assert line(on, "ring", "all_gather", 1, 3).fixed == pytest.approx(2 * 1e-5)
