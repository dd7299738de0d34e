"""Rows of a split dim, by their numbers."""

import pytest
import torch

import tutti
from tutti.ops.indexing.rows import from_end, read_rows, with_spare, without_spare, write_rows


class Part:
    """The second of three parts of four rows."""

    def offset(self, factor):
        return 4

    def size(self, factor):
        return 4

    def whole(self, factor):
        return 12


NUMBERS = torch.tensor([0, 4, 7, 8, 11])


def test_own_rows_are_counted_from_the_first():
    rows, own = read_rows(Part(), "v", NUMBERS)
    assert rows.tolist() == [0, 0, 3, 0, 0] and own.tolist() == [False, True, True, False, False]


def test_rows_of_others_are_written_to_a_spare_row():
    rows, _ = write_rows(Part(), "v", NUMBERS)
    assert rows.tolist() == [4, 0, 3, 4, 4]
    x = torch.zeros(4, 2)
    written = without_spare(with_spare(x, 0).index_add(0, rows, torch.ones(5, 2)), 0)
    assert torch.equal(written, torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))


@pytest.mark.parametrize("number", [-1, 12])
def test_a_row_that_no_rank_has_is_an_error_on_every_rank(number):
    numbers = torch.tensor([number])
    with pytest.raises(IndexError, match="index out of range"):
        torch.embedding(torch.zeros(4, 2), read_rows(Part(), "v", numbers)[0])
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.zeros(5).scatter(0, write_rows(Part(), "v", numbers)[0], 1.0)


def test_negative_numbers_count_from_the_end_of_the_whole():
    assert from_end(Part(), "v", torch.tensor([-1, -12, 3])).tolist() == [11, 0, 3]


@pytest.mark.parametrize("plan", ["dp2", "tp2"])
@pytest.mark.parametrize("label", [7, -1])
def test_a_label_out_of_range_is_named(plan, label):
    model, criterion = torch.nn.Linear(4, 5), torch.nn.CrossEntropyLoss(torch.ones(5))
    labels = torch.full((4,), label)
    options = {"loss": lambda m, b: criterion(m(b[0]), b[1]), "cluster": "cpu:2", "plan": plan, "level": "O0"}
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters()), (torch.ones(4, 4), labels % 5), **options)
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        step((torch.ones(4, 4), labels))
