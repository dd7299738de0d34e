"""Random numbers by key, against published numbers and distributions."""

import torch
from scipy import stats

from tutti.rl.core import keys


def test_folding_is_splitmix64():
    """The first outputs of the generator in the state 0, as its authors publish them."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    zero = torch.tensor(0)
    assert [int(keys.fold(zero, i)) % 2**64 for i in range(3)] == published
    assert [int(x) % 2**64 for x in keys.fold(zero, torch.arange(3))] == published


def test_draws_have_their_distributions():
    key = keys.make(3)
    assert stats.kstest(keys.uniform(keys.fold(key, 0), (20_000,)).numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(keys.normal(keys.fold(key, 1), (20_000,)).numpy(), "norm").pvalue > 1e-3
    counts = keys.integers(keys.fold(key, 2), (20_000,), 7).bincount()
    assert len(counts) == 7 and stats.chisquare(counts).pvalue > 1e-3
    chances = torch.tensor([0.1, 0.2, 0.7])
    drawn = keys.categorical(keys.fold(key, 3), chances.log().expand(20_000, 3)).bincount()
    assert stats.chisquare(drawn, chances * 20_000).pvalue > 1e-3
    orders = torch.stack([keys.permutation(keys.fold(key, i), 3) for i in range(600)])
    assert torch.equal(orders.sort().values, torch.arange(3).expand(600, 3))
    assert stats.chisquare((orders @ torch.tensor([9, 3, 1])).unique(return_counts=True)[1]).pvalue > 1e-3


def test_draws_of_several_keys_at_once_are_those_of_each():
    several = torch.stack(keys.split(keys.make(1), 4))
    draw = lambda key: (keys.normal(key, (3, 2)), keys.permutation(key, 5))  # noqa: E731
    for i, key in enumerate(several):
        for whole, one in zip(torch.vmap(draw)(several), draw(key), strict=True):
            assert torch.equal(whole[i], one)


def test_seeds_have_unlike_numbers():
    drawn = torch.stack([keys.uniform(keys.make(seed), (4,)) for seed in range(1000)])
    assert len(drawn.unique()) > 3990
    assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.15
