"""The ledger counts each memory once, while anybody has it."""

import pytest
import torch

from tutti.exec.stores.memory_budget import MemoryBudget, OverBudget, bytes_of
from tutti.exec.stores.offload_store import OffloadStore
from tutti.plan.tier import DISK


@pytest.fixture
def offload_store(tmp_path):
    return OffloadStore(tmp_path)


def test_a_memory_counts_once_and_until_it_is_gone(offload_store):
    budget, x = MemoryBudget(offload_store), torch.zeros(100)
    budget.hold([x, (x[10:], {"y": x.view(10, 10)})])
    assert budget.now == 400
    view = x[:1]
    del x
    assert budget.now == 400, "a view keeps all of it"
    del view
    assert (budget.now, budget.most) == (0, 400)


def test_what_lies_outside_does_not_count(offload_store):
    budget = MemoryBudget(offload_store)
    budget.hold(offload_store.place(torch.zeros(100), DISK))
    assert budget.now == 0


def test_more_than_the_budget_is_refused_by_name(offload_store):
    budget, x = MemoryBudget(offload_store, 1000), torch.zeros(200)
    budget.hold(x)
    budget.need(200, "mm")
    with pytest.raises(OverBudget, match="layer/mm needs 201 B more on a device that holds 800 B"):
        budget.need(201, "layer/mm")
    with pytest.raises(OverBudget, match="second needs 300 B"):
        budget.admit([("first", 200), ("second", 300), ("third", 400)])


@pytest.mark.parametrize("text", ["2 gigs", "", "-1", "1.2.3GiB", "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="write bytes, or a number with one of B, KiB"):
        bytes_of(text)
