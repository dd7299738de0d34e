"""Batches are parted evenly, told apart by what a graph depends on, and refused where they are others."""

import pytest
import torch

from tutti.graph.step_graph import Spec
from tutti.run.batches import check_like, microbatches, signature_of

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
        ({"x": X, "y": [1]}, "'y' is a list; a batch is a dict or tuple of tensors"),
    ],
)
def test_a_batch_of_another_kind_is_refused(batch, message):
    dtypes = {"x": torch.float32, "y": torch.int64}
    check_like({"x": X[:2], "y": Y[:2]}, dtypes)
    with pytest.raises(ValueError, match=message):
        check_like(batch, dtypes)
