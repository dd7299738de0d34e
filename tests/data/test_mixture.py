import numpy as np
import pytest

from tutti.data.mixture import BLOCK, Mixture

A, B, C = ([{"x": i}] for i in range(3))


def test_every_block_has_the_proportions():
    mixture = Mixture([(A, 0.7), (B, 0.2), (C, 0.1)])
    for seed in (0, 1):
        numbers, _ = mixture.places(seed, np.arange(3 * BLOCK))
        for block in numbers.reshape(3, BLOCK):
            assert np.bincount(block).tolist() == [7000, 2000, 1000]
    early = np.bincount(numbers[:500], minlength=3) / 500
    assert abs(early - [0.7, 0.2, 0.1]).max() < 0.1


def test_turns_count_the_samples_of_a_source():
    mixture = Mixture([(A, 2), (B, 1)])
    numbers, turns = mixture.places(4, np.arange(2 * BLOCK + 50))
    for source in (0, 1):
        assert (turns[numbers == source] == np.arange((numbers == source).sum())).all()


def test_a_place_is_a_function_of_seed_and_sample():
    one, two = Mixture([(A, 1), (B, 1)]), Mixture([(A, 1), (B, 1)])
    numbers, turns = one.places(3, np.arange(25_000))
    for k in (24_999, 7, 10_000):
        assert [int(x[0]) for x in two.places(3, np.array([k]))] == [numbers[k], turns[k]]
    assert (one.places(4, np.arange(100))[0] != numbers[:100]).any()


def test_weights_are_positive_and_not_too_small():
    with pytest.raises(ValueError, match="a weight is -1; weights are positive"):
        Mixture([(A, 1), (B, -1)])
    with pytest.raises(ValueError, match=r"the weight 1e-06 of the total is below 1/10000; raise it"):
        Mixture([(A, 1), (B, 1e-6)])
