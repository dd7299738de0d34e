"""Containers of a batch: flattened by name, rebuilt in kind, and parted by rows."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from tutti.tracing.batch import batch_items, inputs, part, rebuilt, rows, statics

X, Y = torch.arange(24.0).view(6, 4), torch.arange(6)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Sample:
    x: torch.Tensor
    scale: float


BATCH = {"s": Sample(X, 0.5), "p": Pair(Y, torch.ones(4)), "l": [Y + 0, None], "u": UserDict({"z": X})}


def test_leaves_have_their_paths_as_names():
    assert [name for name, _ in batch_items(BATCH)] == ["s.x", "p.a", "p.b", "l.0", "u.z"]
    assert statics(BATCH) == (("s.scale", 0.5), ("l.1", None))
    assert list(inputs(BATCH)) == ["batch:s.x", "batch:p.a", "common:p.b", "common:l.0", "batch:u.z"]


def test_containers_are_rebuilt_in_kind_and_the_old_ones_stay():
    made = rebuilt(BATCH, {"s.x": Y, "u.z": Y, "l.0": X})
    assert type(made["s"]) is Sample and made["s"].x is Y and made["s"].scale == 0.5
    assert type(made["p"]) is Pair and type(made["u"]) is UserDict and made["u"]["z"] is Y and made["l"] == [X, None]
    assert BATCH["s"].x is X and BATCH["u"]["z"] is X


def test_rows_are_the_most_frequent_size_outside_of_lists():
    assert rows(BATCH) == 6
    assert rows({"x": torch.ones(2, 3), "boxes": [torch.ones(5, 4), torch.ones(5, 4)]}) == 2
    assert rows({"boxes": [torch.ones(5, 4), torch.ones(5, 4)]}) == 5
    assert rows({"n": 3}) == rows({"s": torch.tensor(1.0)}) == 0


def test_parts_slice_rows_and_lists_of_samples():
    made = part({**BATCH, "each": [torch.ones(i) for i in range(6)]}, 2, 4)
    assert made["p"].a.tolist() == [2, 3] and made["p"].b is BATCH["p"].b and made["s"].x.shape == (2, 4)
    assert [len(x) for x in made["each"]] == [2, 3] and made["l"] is BATCH["l"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X, "the batch is a tensor; give a dict"),
        (3, "the batch is a int"),
        ({"a": {"b": object()}}, r"batch entry 'a\.b' is a object; .* convert arrays with torch\.as_tensor"),
    ],
)
def test_what_is_no_batch(batch, message):
    with pytest.raises(ValueError, match=message):
        batch_items(batch)
