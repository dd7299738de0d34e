"""Rows of FP8 for messages: what is sent, and that rounding again changes nothing."""

import pytest
import torch

from tutti.nn.linear.fp8_rows import from_fp8, to_fp8, width_of
from tutti.nn.linear.scaled_mm import LARGEST, round_operand, scaled_back

ops = torch.ops.tutti


@pytest.mark.parametrize("hidden", [16, 96, 256])
def test_rows_are_rounded_once(hidden):
    x = torch.randn(7, hidden, generator=torch.Generator().manual_seed(hidden)) * 100
    x[2] = 0
    x[3, 0] = 1e30
    packed = ops.fp8_rows(x.bfloat16())
    assert packed.dtype == torch.uint8 and packed.shape == (7, width_of(hidden))
    rows = from_fp8(packed, hidden, torch.bfloat16)
    assert torch.equal(from_fp8(to_fp8(rows), hidden, torch.bfloat16), rows) and not rows[2].any()
    assert torch.equal(from_fp8(packed, hidden, torch.float32), rows.float()), "exact in bfloat16"
    largest = x.abs().amax(1, keepdim=True)
    error = (rows.float() - x.bfloat16().float()).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, largest * 2**-15)).all()


def test_numbers_of_a_product_stay():
    """A product in FP8 rounds its operand in the same blocks."""
    x = from_fp8(to_fp8(torch.randn(5, 256)), 256, torch.float32)
    smallest = float(x.abs().max()) / LARGEST * 2**-10  # half the spacing of numbers near 0, at the largest scale
    rounded = scaled_back(*round_operand(x, 1, "float8"), "float8")
    torch.testing.assert_close(rounded, x, rtol=2**-4, atol=smallest)


def test_rows_behind_the_last_are_not_unpacked():
    x = torch.randn(6, 32)
    packed, counts = ops.fp8_rows(x), torch.tensor([1, 3])
    rows = ops.rows_of_fp8(packed, counts, 32, "float32", 4)
    assert rows.shape == x.shape and torch.equal(rows[:4], from_fp8(packed, 32, torch.float32)[:4])


def test_schemas_and_fakes():
    x = torch.randn(6, 32)
    torch.library.opcheck(ops.fp8_rows, (x,), test_utils=("test_schema", "test_faketensor"))
    arguments = (ops.fp8_rows(x), torch.tensor([6]), 32, "bfloat16", 6)
    torch.library.opcheck(ops.rows_of_fp8, arguments, test_utils=("test_schema", "test_faketensor"))
