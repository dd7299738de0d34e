"""Routes of tokens to parts of the experts, against loops."""

import pytest
import torch

from tutti.nn.route import expected_sent, most_sent

ops = torch.ops.tutti
TOKENS, EXPERTS = 37, 12


def drawn(choices: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(choices).indices


@pytest.mark.parametrize("parts", [1, 2, 4, 12])
@pytest.mark.parametrize("choices", [1, 2, 5])
def test_a_token_goes_once_to_each_of_its_parts(choices, parts):
    index, own = drawn(choices), EXPERTS // parts
    slot, counts = ops.route(index, own, parts)
    place = 0
    expected = torch.full_like(index, -1)
    for part in range(parts):
        for t in range(TOKENS):
            here = [j for j in range(choices) if index[t, j] // own == part]
            if here:
                expected[t, here[0]] = place
                place += 1
    assert torch.equal(slot, expected)
    assert counts.tolist() == [int((index // own == p).any(1).sum()) for p in range(parts)]
    assert counts.sum() == place <= most_sent(TOKENS, choices, parts)


def test_an_expert_that_does_not_exist():
    with pytest.raises(IndexError, match="index 12 is out of range; there are 12 experts"):
        ops.route(torch.tensor([[0, 12]]), 3, 4)


def test_the_expected_rows_are_the_mean_of_random_choices():
    own, parts, choices = 3, 4, 2
    counts = [ops.route(drawn(choices, seed), own, parts)[1] for seed in range(300)]
    mean = torch.stack(counts).sum(1).double().mean() * (parts - 1) / parts  # of four equal parts, one is here
    assert abs(expected_sent(TOKENS, choices, own, parts) - mean) < 0.02 * mean
    assert expected_sent(TOKENS, 13, own, parts) == 3 * TOKENS  # more choices than experts
