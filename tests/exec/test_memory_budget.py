"""The ledger counts each memory once, while anybody has it."""

import pytest
import torch

from tutti.exec.memory_budget import Ledger, OverBudget, bytes_of
from tutti.exec.offload_store import Shelf
from tutti.plan.tier import DISK


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path)


def test_a_memory_counts_once_and_until_it_is_gone(shelf):
    ledger, x = Ledger(shelf), torch.zeros(100)
    ledger.hold([x, (x[10:], {"y": x.view(10, 10)})])
    assert ledger.now == 400
    view = x[:1]
    del x
    assert ledger.now == 400, "a view keeps all of it"
    del view
    assert (ledger.now, ledger.most) == (0, 400)


def test_what_lies_outside_does_not_count(shelf):
    ledger = Ledger(shelf)
    ledger.hold(shelf.place(torch.zeros(100), DISK))
    assert ledger.now == 0


def test_more_than_the_budget_is_refused_by_name(shelf):
    ledger, x = Ledger(shelf, 1000), torch.zeros(200)
    ledger.hold(x)
    ledger.need(200, "mm")
    with pytest.raises(OverBudget, match="layer/mm needs 201 B more of a device that holds 800 B"):
        ledger.need(201, "layer/mm")
    with pytest.raises(OverBudget, match="second needs 300 B"):
        ledger.admit([("first", 200), ("second", 300), ("third", 400)])


@pytest.mark.parametrize("text", ["2 gigs", "", "-1", "1.2.3GiB", "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="write bytes, or a number with one of B, KiB"):
        bytes_of(text)
