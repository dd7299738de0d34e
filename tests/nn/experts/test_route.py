"""Routes of tokens to parts of the experts, against loops."""

import pytest
import torch

from tutti.nn.experts.route import expected_rows, most_sent

ops = torch.ops.tutti
TOKENS, EXPERTS = 37, 12


def drawn(choices: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(choices).indices


@pytest.mark.parametrize("parts", [1, 2, 4, 12])
@pytest.mark.parametrize("choices", [1, 2, 5])
def test_a_token_goes_once_to_each_of_its_parts(choices, parts):
    index, own = drawn(choices), EXPERTS // parts
    slot, counts = ops.route(index, own, parts, -1)
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


def test_choices_of_other_experts_are_left_out():
    index, own, parts, begin = drawn(5), 2, 3, 4
    slot, counts = ops.route(index, own, parts, begin)
    there = (index >= begin) & (index < begin + own * parts)
    part = torch.where(there, (index - begin) // own, -1)
    assert not (slot[~there] >= 0).any()
    assert counts.tolist() == [int((part == p).any(1).sum()) for p in range(parts)]
    assert sorted(slot[slot >= 0].tolist()) == list(range(int(counts.sum())))


def test_an_expert_that_does_not_exist():
    with pytest.raises(IndexError, match="index 12 is out of range; there are 12 experts"):
        ops.route(torch.tensor([[0, 12]]), 3, 4, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_and_added(dtype):
    slot, counts = ops.route(drawn(4), 3, 4, -1)
    x = torch.randn(TOKENS, 8).to(dtype)
    rows = ops.send_rows(x, slot, most_sent(TOKENS, 4, 4), 0)
    assert len(rows) == TOKENS * 4
    for t, places in enumerate(slot.tolist()):
        assert all(torch.equal(rows[place], x[t]) for place in places if place >= 0)
    y = ops.add_rows(rows, slot, 0)
    times = (slot >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(y, (x.float() * times).to(dtype))
    assert counts.sum() == times.sum()


def test_the_expected_rows_are_the_mean_of_random_choices():
    own, parts, choices = 3, 4, 2
    counts = [ops.route(drawn(choices, seed), own, parts, -1)[1] for seed in range(300)]
    mean = torch.stack(counts).sum(1).double().mean()
    assert abs(expected_rows(TOKENS, choices, own, parts) - mean) < 0.02 * mean
    assert expected_rows(TOKENS, 13, own, parts) == 4 * TOKENS  # more choices than experts


@pytest.mark.parametrize("own", [1, 2, 4, 8, 16])
def test_the_expected_rows_of_routers_that_limit_groups(own):
    """32 experts in 8 groups; a token's 6 are in 3 of them."""
    generator = torch.Generator().manual_seed(own)
    groups = torch.rand(4000, 8, generator=generator).topk(3).indices
    open_ = torch.zeros(4000, 8).scatter(1, groups, 1.0).repeat_interleave(4, 1)
    index = (torch.rand(4000, 32, generator=generator) * open_).topk(6).indices
    mean = ops.route(index, own, 32 // own, -1)[1].sum().item()
    assert abs(expected_rows(4000, 6, own, 32 // own, (8, 3)) - mean) < 0.02 * mean
