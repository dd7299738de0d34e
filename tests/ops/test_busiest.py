"""How much more the busiest rank of an expert-parallel axis computes."""

import pytest
import torch

import tutti
from tutti.ir.op_info import WORK
from tutti.nn import MoE

ops = torch.ops.tutti


def experts(tokens: int):
    graph = tutti.capture(MoE(4, 8, 64, 2), (torch.ones(1, tokens, 4),), loss=lambda m, b: m(*b)[0].sum())
    return {n.target: n for n in graph.calls if n.target in WORK}


@pytest.mark.parametrize("k", [2, 8, 64])
@pytest.mark.parametrize("tokens", [512, 8192])
def test_it_is_the_mean_of_the_largest_load_under_even_routing(k, tokens):
    loads = torch.distributions.Multinomial(2 * tokens, torch.ones(k))
    torch.manual_seed(0)
    largest = loads.sample((400,)).amax(1).mean().item() / (2 * tokens / k)
    for target, node in experts(tokens).items():
        factor = WORK[target](node, "e", 1, k)
        assert factor > 1 and factor - 1 == pytest.approx(largest - 1, rel=0.55)  # sqrt(2 ln k) is an upper bound of it
        assert factor >= largest - 0.01


def test_other_factors_are_even_and_one_rank_has_no_more_than_all():
    for target, node in experts(1).items():
        assert WORK[target](node, "f", 2, 4) == WORK[target](node, "t", 1, 2) == 1
        assert WORK[target](node, "e", 1, 2) <= 2
