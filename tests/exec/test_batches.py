"""Batches are parted evenly, told apart by what a graph depends on, and refused where they are others."""

import pytest
import torch

from tutti.exec.batches import check_like, microbatches, signature_of
from tutti.ir.spec import Spec

X, Y = torch.arange(24.0).view(6, 4), torch.arange(6)


def test_microbatches_are_equal_parts_in_order():
    parts = microbatches({"x": X, "y": Y}, 3)
    assert [part["y"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(torch.cat([part["x"] for part in parts]), X)
    (x, y), _ = microbatches((X, Y), 2)
    assert torch.equal(x, X[:3]) and y.tolist() == [0, 1, 2]
    whole = {"x": X}
    assert microbatches(whole, 1) == [whole]


@pytest.mark.parametrize(("value", "count"), [(X, 4), (torch.tensor(1.0), 2)])
def test_what_does_not_divide_is_named(value, count):
    with pytest.raises(ValueError, match=rf"'x' of shape \(.*\) does not divide into {count} microbatches"):
        microbatches({"x": value}, count)


def test_a_signature_is_keys_shapes_and_dtypes():
    assert signature_of({"x": X, "y": Y}) == (("x", Spec((6, 4), torch.float32)), ("y", Spec((6,), torch.int64)))
    assert signature_of((X, Y)) == signature_of((X + 1, Y)) != signature_of((X, Y.int()))


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
    check_like({"x": X[:2], "y": Y[:2]}, dtypes)
    with pytest.raises(ValueError, match=message):
        check_like(batch, dtypes)


def test_microbatches_of_nested_batches_share_what_has_no_rows():
    boxes = [{"b": torch.ones(i, 4)} for i in range(1, 7)]
    batch = {"x": X, "more": (Y, {"scale": torch.tensor(2.0), "mode": "a"}), "table": torch.ones(3, 4), "boxes": boxes}
    first, second = microbatches(batch, 2)
    assert first["more"][0].tolist() == [0, 1, 2] and second["more"][1] == batch["more"][1]
    assert second["boxes"] == boxes[3:] and first["table"] is batch["table"]


def test_a_signature_has_static_values():
    one, other = ({"x": X, "options": {"mode": mode, "none": None}} for mode in ("a", "b"))
    assert signature_of(one) != signature_of(other)
    assert ("options.mode", "a", "str") in signature_of(one)
    assert signature_of((X, 1)) != signature_of((X, 1.0)) != signature_of((X, True))
