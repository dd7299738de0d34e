"""Rows written into a paged cache, in a copy and in place."""

import pytest
import torch
from torch.library import opcheck

import tutti
from tutti.nn.attention import paged_write
from tutti.nn.attention.paged_attention import numbers, row_size, unrounded

ops = torch.ops.tutti


def drawn(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(20, 2, 4).to(dtype), torch.randn(5, 2, 4).to(dtype), torch.tensor([3, -1, 19, 0, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.starts
def test_rows_go_to_their_slots(dtype):
    cache, values, slots = drawn(dtype)
    wanted = cache.clone()
    wanted[[3, 19, 0]] = values[[0, 2, 3]]
    assert torch.equal(ops.paged_write(cache, values, slots), wanted)
    paged_write.reference(by_formula := cache.clone(), values, slots)
    assert torch.equal(by_formula, wanted)
    ops.paged_write_(cache, values, slots)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("write", [ops.paged_write, lambda c, *x: (paged_write.reference(c, *x), c)[1]])
def test_padding_writes_nothing(write):
    cache, values, slots = drawn()
    before = cache.clone()
    assert torch.equal(write(cache, values, torch.full_like(slots, -1)), before)
    assert torch.equal(write(cache, values[:0], slots[:0]), before)


def test_strides_and_dtypes():
    cache, values, slots = drawn()
    wanted = ops.paged_write(cache, values, slots)
    fused = torch.cat([cache, cache], 1)
    ops.paged_write_(fused[:, 2:], torch.cat([values, values], 1)[:, 2:], slots)
    assert torch.equal(fused[:, 2:], wanted) and torch.equal(fused[:, :2], cache)
    turned = cache.mT.contiguous().mT
    ops.paged_write_(turned, values.mT.contiguous().mT, slots)
    assert torch.equal(turned, wanted)
    assert torch.equal(ops.paged_write(cache.bfloat16(), values, slots), wanted.bfloat16())


def test_registration():
    opcheck(ops.paged_write.default, drawn())
    opcheck(ops.paged_write_.default, drawn())


def test_what_does_not_fit():
    cache, values, slots = drawn()
    with pytest.raises(ValueError, match=r"values \(5, 1, 4\)"):
        ops.paged_write(cache, values[:, :1], slots)
    with pytest.raises(ValueError, match=r"\(5,\) torch.int32"):
        ops.paged_write(cache, values, slots.int())
    with pytest.raises(IndexError, match="slot 20 of a cache with 20 slots"):
        ops.paged_write(cache, values, slots + 1)


class Cache:
    def __init__(self, slots):
        self.keys = torch.zeros(slots, 2, 4)


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("plan, devices", [("single", 1), ("tp", 2)])
def test_a_stored_cache_is_written_in_place(plan, devices, level):
    cache = Cache(20)
    store = tutti.Store(cache=cache)

    def write(values, slots):
        cache.keys = ops.paged_write(cache.keys, values, slots)
        return cache.keys.sum()

    _, values, slots = drawn()
    fn = tutti.function(write, values, slots, store=store, cluster=f"cpu:{devices}", plan=plan, level=level)
    wanted = torch.zeros(20, 2, 4)
    for scale in (1, 2, 3):
        total = fn(scale * values, slots)
        wanted = ops.paged_write(wanted, scale * values, slots)
        torch.testing.assert_close(total, wanted.sum())
    targets = [n.target for n in fn.program.graph.nodes]
    assert ops.paged_write_.default in targets and ops.paged_write.default not in targets


def test_a_cache_that_is_read_afterwards_is_copied():
    cache = Cache(20)
    store = tutti.Store(cache=cache)

    def write(values, slots):
        before = cache.keys
        cache.keys = ops.paged_write(before, values, slots)
        return (cache.keys - before).sum()

    _, values, slots = drawn()
    fn = tutti.function(write, values, slots, store=store, cluster="cpu:1", plan="single")
    torch.testing.assert_close(fn(values, slots), values[slots >= 0].sum())
    torch.testing.assert_close(fn(values, slots), torch.tensor(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.starts
def test_rows_of_int8_are_the_nearest(dtype):
    _, values, slots = drawn(dtype)
    values[2, 1] = 0
    cache = torch.zeros(20, 2, 8, dtype=torch.int8)
    written = ops.paged_write(cache, values, slots)
    wanted = cache.clone()
    wanted[[3, 19, 0]] = paged_write.rounded(values)[[0, 2, 3]]
    assert torch.equal(written, wanted)
    back, scales = unrounded(written[[3, 19, 0]]), values[[0, 2, 3]].float().abs().amax(2, keepdim=True) / 127
    assert ((back - values[[0, 2, 3]].float()).abs() <= scales * 0.501).all() and back[1, 1].eq(0).all()
    opcheck(ops.paged_write.default, (cache, values, slots))
    with pytest.raises(ValueError, match=r"or of int8 or int4 \(slots, heads, row_size"):
        ops.paged_write(cache[..., :4], values, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, size", [(2, 5), (64, 36), (80, 48), (128, 72)])
@pytest.mark.starts
def test_rows_of_int4_are_the_nearest(width, size, dtype):
    torch.manual_seed(0)
    values, slots = (3 + torch.randn(4, 2, width)).to(dtype), torch.tensor([3, -1, 19, 0])
    values[2, 1] = 0
    assert row_size(width, torch.uint8) == size and numbers(size, torch.uint8) == width
    cache = torch.zeros(20, 2, size, dtype=torch.uint8)
    written = ops.paged_write(cache, values, slots)
    paged_write.reference(wanted := cache.clone(), values, slots)
    assert torch.equal(written, wanted) and written[[i for i in range(20) if i not in (0, 3, 19)]].eq(0).all()
    back, exact = unrounded(written[[3, 19, 0]]), values[[0, 2, 3]].float()
    for mine, own in zip(back.split(64, -1), exact.split(64, -1), strict=True):
        step = (own.amax(-1, keepdim=True) - own.amin(-1, keepdim=True)) / 15
        assert ((mine - own).abs() <= 0.51 * step + own.abs().amax() / 1000).all()
    assert back[1, 1].eq(0).all()
    opcheck(ops.paged_write.default, (cache, values, slots))


def test_rows_of_int4_without_a_finite_range():
    values = torch.tensor([[[torch.nan, 1.0]], [[1e9, -1e9]]])
    written = ops.paged_write(torch.zeros(2, 1, 5, dtype=torch.uint8), values, torch.arange(2))
    back = unrounded(written)
    assert back[0].isnan().all() and not bool(back[1].isnan().any()) and back[1, 0, 0] > 6e4 > 0 > back[1, 0, 1]
    with pytest.raises(ValueError, match="rows of 3 numbers; expected an even number"):
        row_size(3, torch.uint8)
