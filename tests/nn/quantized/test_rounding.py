"""Stochastic rounding against the numbers of bfloat16 around, and against exact averages."""

from __future__ import annotations

import pytest
import torch

from tutti.nn.quantized import rounding

ops = torch.ops.tutti
EVERY = torch.arange(1 << 16) / (1 << 16)  # draws of which each is as likely as any other


def drawn(count: int) -> torch.Tensor:
    """Numbers of all magnitudes and both signs."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-37, 37, (count,), generator=generator)


def test_one_of_the_two_numbers_around():
    x, u = drawn(10_000), torch.rand(10_000, generator=torch.Generator().manual_seed(1))
    rounded = ops.round_stochastically(x, u)
    near = x.to(torch.bfloat16)
    beyond = torch.where(near.float() < x, torch.inf, -torch.inf).to(torch.bfloat16)
    other = torch.where(near.float() == x, near, torch.nextafter(near, beyond))
    assert rounded.dtype == torch.bfloat16 and ((rounded == near) | (rounded == other)).all()
    assert (rounded == near).any() and (rounded == other).any()


def test_the_average_is_exact():
    for x in drawn(20):
        rounded = ops.round_stochastically(x.expand(len(EVERY)), EVERY)
        assert rounded.double().mean() == x.double()


def test_what_bfloat16_holds_stays():
    limits = torch.finfo(torch.bfloat16)
    values = [0.0, -0.0, 1.0, -3.5, limits.max, limits.min, limits.tiny, torch.inf, -torch.inf]
    x = torch.tensor(values).unsqueeze(1).expand(-1, 1000)
    rounded = ops.round_stochastically(x, EVERY[-1000:].expand_as(x))
    assert torch.equal(rounded.view(torch.int16), x.to(torch.bfloat16).view(torch.int16))


def test_no_number_stays_none():
    payloads = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert ops.round_stochastically(payloads, EVERY[-4:]).isnan().all()


@pytest.mark.starts
def test_compiled_gives_the_same_bits():
    x, u = drawn(5000), torch.rand(5000, generator=torch.Generator().manual_seed(2))
    rounded = torch.compile(rounding.forward, dynamic=False, fullgraph=True)(x, u)
    assert torch.equal(rounded, ops.round_stochastically(x, u))


def test_to_nearest_is_a_cast():
    x = drawn(10_000)
    rounded = ops.round_to_nearest(x)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, x.to(torch.bfloat16))
    assert torch.equal(ops.round_to_nearest(rounded), rounded)
    torch.library.opcheck(ops.round_to_nearest.default, (x,), test_utils=("test_schema", "test_faketensor"))
