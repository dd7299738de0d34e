import pytest
import torch

from tutti.data.ahead import Ahead, size_of


def doubled(x):
    if x == 3:
        raise ValueError("three")
    return {"x": torch.full((10,), 2 * x)}


def test_results_are_in_order_and_errors_in_their_turn():
    with_thread = Ahead(iter(range(5)), doubled, budget=10_000)
    for i in range(3):
        assert next(with_thread)["x"][0] == 2 * i and with_thread.unit == i
    with pytest.raises(ValueError, match="three"):
        next(with_thread)
    with_thread.close()


def test_without_a_budget_nothing_is_computed_ahead():
    seen = []
    plain = Ahead(iter(range(3)), lambda x: seen.append(x) or x, budget=0)
    assert next(plain) == 0 and seen == [0] and list(plain) == [1, 2]


def test_a_budget_bounds_what_waits():
    import time

    begun = []

    def make(x):
        begun.append(x)
        return torch.zeros(100)  # 400 bytes

    ahead = Ahead(iter(range(100)), make, budget=1200)
    next(ahead)
    while len(begun) < 4:
        time.sleep(0.001)
    assert len(ahead._futures) == 3
    next(ahead)
    assert len(ahead._futures) == 3
    ahead.close()


@pytest.mark.starts
def test_workers_give_the_same():
    ahead = Ahead(iter([0, 1, 2]), doubled, budget=1 << 20, workers=2)
    assert [int(batch["x"][0]) for batch in ahead] == [0, 2, 4]


def test_sizes():
    assert size_of({"x": torch.zeros(3), "y": ["ab", b"c"], "z": [1, 2]}) == 12 + 3 + 64
