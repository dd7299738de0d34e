"""Containers of a batch: flattened by name, rebuilt in kind, and parted by rows."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from tutti.ir.spec import Spec
from tutti.tracing.batch import FlatBatch

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
    assert list(FlatBatch(BATCH).tensors) == ["s.x", "p.a", "p.b", "l.0", "u.z"]
    assert FlatBatch(BATCH).statics == {"s.scale": 0.5, "l.1": None}
    assert list(FlatBatch(BATCH).inputs) == ["batch:s.x", "batch:p.a", "common:p.b", "common:l.0", "batch:u.z"]


def test_containers_are_rebuilt_in_kind_and_the_old_ones_stay():
    flat = FlatBatch(BATCH)
    batch = flat.rebuilt({**flat.inputs, "batch:s.x": Y, "batch:u.z": Y, "common:l.0": X})
    assert type(batch["s"]) is Sample and batch["s"].x is Y and batch["s"].scale == 0.5
    assert (
        type(batch["p"]) is Pair and type(batch["u"]) is UserDict and batch["u"]["z"] is Y and batch["l"] == [X, None]
    )
    assert BATCH["s"].x is X and BATCH["u"]["z"] is X


def test_rows_are_the_most_frequent_size_outside_of_lists():
    assert FlatBatch(BATCH).rows == 6
    assert FlatBatch({"x": torch.ones(2, 3), "boxes": [torch.ones(5, 4), torch.ones(5, 4)]}).rows == 2
    assert FlatBatch({"boxes": [torch.ones(5, 4), torch.ones(5, 4)]}).rows == 5
    assert FlatBatch({"n": 3}).rows == FlatBatch({"s": torch.tensor(1.0)}).rows == 0


def test_a_tensor_that_is_in_a_list_too_counts_once():
    table = torch.zeros(8)
    flat = FlatBatch({"x": torch.zeros(4, 2), "table": table, "boxes": [table]})
    assert flat.rows == 4 and list(flat.inputs) == ["batch:x", "common:table", "common:boxes.0"]


def test_parts_slice_rows_and_lists_of_samples():
    part = FlatBatch({**BATCH, "each": [torch.ones(i) for i in range(6)]}).part(2, 4)
    assert part["p"].a.tolist() == [2, 3] and part["p"].b is BATCH["p"].b and part["s"].x.shape == (2, 4)
    assert [len(x) for x in part["each"]] == [2, 3] and part["l"] is BATCH["l"]


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
        FlatBatch(batch)


def test_microbatches_are_equal_parts_in_order():
    parts = [part.batch for part in FlatBatch({"x": X, "y": Y}).parts(3)]
    assert [part["y"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(torch.cat([part["x"] for part in parts]), X)
    x, y = FlatBatch((X, Y)).parts(2)[0].batch
    assert torch.equal(x, X[:3]) and y.tolist() == [0, 1, 2]
    whole = FlatBatch({"x": X})
    assert whole.parts(1) == [whole]


@pytest.mark.parametrize(("value", "count"), [(X, 4), (torch.tensor(1.0), 2)])
def test_what_does_not_divide_is_named(value, count):
    with pytest.raises(ValueError, match=rf"'x' of shape \(.*\) does not divide into {count} microbatches"):
        FlatBatch({"x": value}).parts(count)


def test_a_signature_is_keys_shapes_and_dtypes():
    assert FlatBatch({"x": X, "y": Y}).signature == (("x", Spec((6, 4), torch.float32)), ("y", Spec((6,), torch.int64)))
    assert FlatBatch((X, Y)).signature == FlatBatch((X + 1, Y)).signature != FlatBatch((X, Y.int())).signature


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X}, r"the batch lacks 'y'; it had \['x', 'y'\] when the step was made"),
        ({"x": X, "y": Y, "z": Y}, "the batch has 'z', which it did not have"),
        ({"x": X.double(), "y": Y}, "'x' is torch.float64; it was torch.float32 when the step was made"),
        ({"x": X, "y": [1]}, "batch entry 'y' is a list; it was a tensor when the step was made"),
    ],
)
def test_a_batch_of_another_kind_is_refused(batch, message):
    dtypes = {"x": torch.float32, "y": torch.int64}
    FlatBatch({"x": X[:2], "y": Y[:2]}).check_like(dtypes)
    with pytest.raises(ValueError, match=message):
        FlatBatch(batch).check_like(dtypes)


def test_microbatches_of_nested_batches_share_what_has_no_rows():
    boxes = [{"b": torch.ones(i, 4)} for i in range(1, 7)]
    batch = {"x": X, "more": (Y, {"scale": torch.tensor(2.0), "mode": "a"}), "table": torch.ones(3, 4), "boxes": boxes}
    first, second = (part.batch for part in FlatBatch(batch).parts(2))
    assert first["more"][0].tolist() == [0, 1, 2] and second["more"][1] == batch["more"][1]
    assert second["boxes"] == boxes[3:] and first["table"] is batch["table"]


def test_a_signature_has_static_values():
    one, other = ({"x": X, "options": {"mode": mode, "none": None}} for mode in ("a", "b"))
    assert FlatBatch(one).signature != FlatBatch(other).signature
    assert ("options.mode", "a", "str") in FlatBatch(one).signature
    assert FlatBatch((X, 1)).signature != FlatBatch((X, 1.0)).signature != FlatBatch((X, True)).signature
