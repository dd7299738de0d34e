"""Attention over a split sequence, by a ring and by all-to-alls over heads: equal to the whole, bytes as in theory."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from cases import crossed
from tutti.lower.shard import shard
from tutti.ops import rule_of
from tutti.ops.attention.attention import BACKWARD, FORWARD, blocks
from tutti.plan.layouts.choice import Choice
from tutti.plan.layouts.layout import Layout, Split
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 24, 4


class Attention(nn.Module):
    """Queries, keys and values as parameters, so that their gradients show."""

    def __init__(self, groups: int, causal: bool):
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Parameter(torch.randn(BATCH, HEADS, LENGTH, WIDTH))
        self.k = nn.Parameter(torch.randn(BATCH, groups, LENGTH, WIDTH))
        self.v = nn.Parameter(torch.randn(BATCH, groups, LENGTH, WIDTH))
        self.causal = causal

    def forward(self, x):
        out = F.scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=self.causal, enable_gqa=self.k.shape[1] < HEADS
        )
        return (out * x).sum()


X = torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def plan_of(graph, mesh, attention: dict[str, Choice], sequence: dict[str, Split]) -> Plan:
    """Everything over the sequence, the attention itself by these choices."""
    layout = Layout.of(sequence)
    inputs = {n.meta["label"]: layout for n in graph.inputs.values() if len(n.meta["val"].shape) == 4}
    operators = {}
    for node in graph.calls:
        if node.target in (FORWARD, BACKWARD):
            operators[node.meta["label"]] = attention
        elif node.target is not operator.getitem:
            rule = rule_of(node)
            factors = {dims[2][0] for dims in (*rule.inputs, *rule.outputs) if len(dims) == 4 and dims[2]}
            if len(factors) == 1:
                factor = factors.pop()
                operators[node.meta["label"]] = {axis: Choice(factor, s.outer) for axis, s in sequence.items()}
    return Plan(mesh, inputs, operators)


def run(groups, causal, plan, devices):
    model = Attention(groups, causal)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = tutti.parallelize(model, optimizer, (X,), cluster=f"cpu:{devices}", plan=plan, level="O0")
    return step((X,)), step.state_dict()


def graph_of(groups, causal):
    model = Attention(groups, causal)
    return tutti.capture(model, (X,), torch.optim.SGD(model.parameters(), lr=1.0))


WAYS = {
    "ring": lambda k: ({"a": Choice("s")}, {"a": Split(2)}),
    "striped ring": lambda k: ({"a": Choice("s", LENGTH // k)}, {"a": Split(2, LENGTH // k)}),
    "chunked ring": lambda k: ({"a": Choice("s", 3)}, {"a": Split(2, 3)}),
    "heads": lambda k: ({"a": Choice("g")}, {"a": Split(2)}),
    "heads of a group": lambda k: ({"a": Choice("r")}, {"a": Split(2)}),
}


QUICK = [*((way, 2, 8, True) for way in WAYS), ("ring", 4, 4, False), ("heads of a group", 2, 4, False)]


@pytest.mark.parametrize("way, k, groups, causal", crossed(WAYS, [2, 4], [4, 8], [False, True], quick=QUICK))
def test_equal_to_the_whole(way, k, groups, causal):
    attention, sequence = WAYS[way](k)
    if way == "heads of a group" and HEADS // groups % k:
        pytest.skip("a group has fewer heads")
    plan = plan_of(graph_of(groups, causal), {"a": k}, attention, sequence)
    expected, ours = run(groups, causal, "single", 1), run(groups, causal, plan, k)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_ring_within_heads():
    """Both at once, on two axes."""
    graph = graph_of(8, True)
    attention = {"a": Choice("g"), "b": Choice("s", 8)}
    plan = plan_of(graph, {"a": 2, "b": 3}, attention, {"a": Split(2, 12), "b": Split(2, 4)})
    torch.testing.assert_close(run(8, True, plan, 6), run(8, True, "single", 1), rtol=1e-5, atol=1e-5)


def test_a_ring_over_two_axes():
    graph = graph_of(4, True)
    attention = {"a": Choice("s", 4), "b": Choice("s", 8)}
    plan = plan_of(graph, {"a": 2, "b": 3}, attention, {"a": Split(2, 4), "b": Split(2, 8)})
    torch.testing.assert_close(run(4, True, plan, 6), run(4, True, "single", 1), rtol=1e-5, atol=1e-5)


def sent(groups, k, way) -> dict[str, int]:
    """Bytes that one rank sends, by collective and phase."""
    graph = graph_of(groups, True)
    layout = Layout.of(WAYS[way](k)[1])
    plan = plan_of(graph, {"a": k}, *WAYS[way](k))
    program = shard(graph, plan, 0, {name: layout for name in graph.outputs if name.startswith("grad")})
    phases = {n.meta["label"]: n.meta["phase"] for n in graph.calls}
    sent_bytes: dict[str, int] = {}
    for c in program.collectives:
        if c.kind in ("ppermute", "all_to_all"):
            key = f"{c.kind} {phases.get(c.label, 'forward')}"
            sent_bytes[key] = sent_bytes.get(key, 0) + c.bytes
    return sent_bytes


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("way", ["ring", "striped ring"])
@pytest.mark.parametrize("groups", [4, 8])
def test_bytes_of_a_ring(way, k, groups):
    """Each rank hands on keys and values k - 1 times; in the backward pass their gradients as well."""
    block = BATCH * groups * (LENGTH // k) * WIDTH * 4
    assert sent(groups, k, way) == {"ppermute forward": (k - 1) * 2 * block, "ppermute backward": (k - 1) * 4 * block}


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("groups", [4, 8])
def test_bytes_of_all_to_alls_over_heads(k, groups):
    """Each rank keeps 1 / k of q, k, v and the result; the backward pass moves as many gradients.

    The rank's q, k, v and result over heads are still there from the forward pass.
    """
    q, kv = (BATCH * n * (LENGTH // k) * WIDTH * 4 for n in (HEADS, groups))
    forward = (q + 2 * kv + q) * (k - 1) // k
    sent_bytes = sent(groups, k, "heads")
    assert sent_bytes["all_to_all forward"] == forward
    assert sent_bytes["all_to_all backward"] == (q + q + 2 * kv) * (k - 1) // k


@pytest.mark.parametrize(("outer", "ratio"), [(1, 7 / 4), (LENGTH // 4, 1.15)])
def test_striped_parts_balance_a_causal_mask(outer, ratio):
    """The busiest of four ranks against the mean, in pairs of a query and a key."""
    digits = [(outer, None), (4, "a"), (LENGTH // (4 * outer), None)]
    digits = [d for d in digits if d[0] > 1]
    pairs = [
        sum(
            n * (n + 1) // 2 if b.causal else n * (b.columns.stop - b.columns.start)
            for there in range(4)
            for b in blocks(digits, {"a": here}, {"a": there})
            for n in [b.rows.stop - b.rows.start]
        )
        for here in range(4)
    ]
    assert sum(pairs) == LENGTH * (LENGTH + 1) // 2
    assert max(pairs) / (sum(pairs) / 4) == pytest.approx(ratio, rel=0.05)


class Long(nn.Module):
    """Attention over 16,384 tokens, without memory."""

    def __init__(self, groups: int):
        super().__init__()
        shape = lambda heads: (1, heads, 16_384, 128)  # noqa: E731
        self.q, self.k, self.v = (nn.Parameter(torch.empty(shape(n), device="meta")) for n in (32, groups, groups))

    def forward(self, x, scale):
        q, k, v = (p * scale for p in (self.q, self.k, self.v))  # no parameters any more, whose moves are discouraged
        return (F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < 32) * x).sum()


@pytest.mark.parametrize(("groups", "expected"), [(32, "g"), (2, "s")])
def test_the_planner_takes_the_cheaper_way(groups, expected):
    """With tokens split over 8 devices: all-to-alls over many heads; the ring where few keys and values travel."""
    model = Long(groups)
    batch = (torch.empty(1, 32, 16_384, 128, device="meta"), torch.empty((), device="meta"))
    graph = tutti.capture(model, batch, torch.optim.SGD(model.parameters()))
    pins = [tutti.pin(name, dim=2, axis="tp") for name in "qkv"]
    plan = Planner(graph, tutti.Cluster.parse("h100:8"), pins).named("tp8")
    chosen = {label: str(choices["tp"]) for label, choices in plan.operators.items() if "attention" in label}
    assert len(chosen) == 2 and set(chosen.values()) == {expected}
