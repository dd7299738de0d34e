"""The folded problem: one operator a label, edges with multiplicities, positions at which factors may be split."""

import pytest
import torch
from torch import nn

import tutti
import zoo
from searches import search
from tutti.plan.layouts.problem import Edge, problem_of


def folded(model, batch=None):
    return problem_of(tutti.capture(model, batch or zoo.tokens(4), torch.optim.AdamW(model.parameters())))


@pytest.fixture(scope="module")
def problems():
    return {depth: folded(zoo.gpt2(depth)) for depth in (2, 4)}


def test_its_size_does_not_grow_with_depth(problems):
    assert problems[2].operators.keys() == problems[4].operators.keys()
    assert problems[2].edges.keys() == problems[4].edges.keys()
    fused = "param:transformer.h.*.attn.c_attn.weight"
    assert [problems[depth].operators[fused].count for depth in (2, 4)] == [2, 4]


def test_edges_count_readers(problems):
    for depth, problem in problems.items():
        weight = ("param:transformer.h.*.mlp.c_fc.weight", 0)
        readers = {edge: n for edge, n in problem.edges.items() if edge.tensor == weight}
        assert set(readers.values()) == {depth} and len(readers) == 3  # forward, backward, update
        successor = Edge(("transformer.h.*.mlp.c_fc/update/tutti.adam", 0), weight[0], -1)
        assert problem.edges[successor] == depth


def test_positions_of_heads_reach_the_fused_weight(problems):
    cuts = problems[2].cuts["param:transformer.h.*.attn.c_attn.weight"]
    assert {(1, 1), (3, 16)} <= cuts["b"], "three blocks of heads: q, k and v"
    cuts = problems[2].cuts["param:transformer.h.*.attn.c_proj.weight"]
    assert cuts["a"] >= {(1, 1), (1, 16), (4, 1)}, "4 heads of 16"


def test_what_depends_on_the_batch(problems):
    reached = problems[2].reached_from("batch")
    assert "transformer.h.*.attn.c_attn/forward/addmm" in reached
    assert not any(label.startswith(("param:", "batch:")) for label in reached)


def test_operators_without_a_rule_are_known():
    class Ruleless(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return zoo.ruleless(self.weight * x).sum()

    problem = folded(Ruleless(), (torch.eye(4),))
    assert "tutti_tests.ruleless.default" in problem.without_rule
    with pytest.warns(
        UserWarning, match=r"no rule says how to split .*tutti_tests\.ruleless\.default.*: every device computes"
    ):
        model = Ruleless()
        graph = tutti.capture(model, (torch.eye(4),), torch.optim.SGD(model.parameters(), lr=0.1))
        plan = search(graph, "cpu:2").best()
    assert "tutti_tests.ruleless.default" in plan.explain()
