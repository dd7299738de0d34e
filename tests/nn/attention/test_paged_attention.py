"""Attention over a paged cache against its formula, and bits that depend on nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from tutti import compat
from tutti.nn.attention import paged_attention
from tutti.nn.attention.paged_write import rounded
from tutti.nn.compiled import source

attention = torch.ops.tutti.paged_attention
BLOCK = 16
BIAS = torch.linspace(-2, 2, 4 * 33).sin().view(4, 33)


def drawn(counts, lengths, heads=4, groups=2, width=32, value_width=32, dtype=torch.float32, seed=0, **options):
    """The arguments for sequences of these many new tokens and cached ones, in blocks of any order, and 3 tokens of
    padding."""
    g = torch.Generator().manual_seed(seed)
    blocks = [-(-n // BLOCK) for n in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=g).int()
    tables = torch.zeros(len(counts), max(blocks), dtype=torch.int32)
    for table, own in zip(tables, order[: sum(blocks)].split(blocks), strict=True):
        table[: len(own)] = own
    slots, tokens = len(order) * BLOCK, sum(counts) + 3
    query = torch.randn(tokens, heads, width, generator=g).to(dtype)
    keys = torch.randn(slots, groups, width, generator=g).to(dtype)
    values = torch.randn(slots, groups, value_width, generator=g).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    options = {"block": BLOCK, "scale": width**-0.5, **options}
    return (query, keys, values, tables, starts, torch.tensor(lengths).int()), options


def exact(args, options):
    query, keys, values, *rest = args
    return paged_attention.reference(query.double(), keys.double(), values.double(), *rest, **options)


CASES = {
    "decode": dict(counts=[1, 1, 1], lengths=[1, 70, 300]),
    "prefill": dict(counts=[100, 65], lengths=[100, 65]),
    "mixed": dict(counts=[1, 70, 0, 1], lengths=[130, 200, 40, 65]),
    "groups of 3": dict(counts=[5, 1], lengths=[90, 66], heads=6, groups=2),
    "one key head": dict(counts=[9], lengths=[80], heads=5, groups=1),
    "odd widths": dict(counts=[4, 1], lengths=[20, 70], width=20, value_width=36),
    "wide": dict(counts=[2], lengths=[70], width=128, value_width=128),
    "80 numbers": dict(counts=[1, 6], lengths=[70, 90], width=80, value_width=96),
    "a query for each key": dict(
        counts=[1, 1, 30], lengths=[200, 3, 130], heads=12, groups=12, width=64, value_width=64
    ),
    "window": dict(counts=[80, 1], lengths=[150, 140], window=40),
    "softcap": dict(counts=[10, 1], lengths=[70, 80], softcap=1.5),
    "sinks": dict(counts=[10, 1], lengths=[70, 80], sinks=torch.tensor([1.0, -1.0, 0.0, 3.0])),
    "bias by distance": dict(counts=[10, 1], lengths=[70, 200], bias=BIAS),
    "cross attention": dict(counts=[10, 1, 2], lengths=[70, 80, 3], causal=False),
    "all": dict(counts=[70], lengths=[90], window=30, softcap=2.0, sinks=torch.ones(4), bias=BIAS[:, :9]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.starts
def test_equals_the_formula(name, dtype):
    args, options = drawn(**CASES[name], dtype=dtype)
    out, wanted = attention(*args, **options), exact(args, options)
    assert out.dtype == dtype and out.shape == wanted.shape
    bound = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 4e-3}
    torch.testing.assert_close(out.double(), wanted, **bound)
    assert out[-3:].eq(0).all(), "padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stored, bound_of_rounding", [(torch.int8, 0.02), (torch.uint8, 0.25)], ids=["int8", "int4"])
@pytest.mark.starts
def test_rounded_keys_and_values(name, stored, bound_of_rounding, dtype):
    (query, keys, values, *rest), options = drawn(**CASES[name], dtype=dtype)
    cache = rounded(keys, stored), rounded(values, stored)
    out = attention(query, *cache, *rest, **options)
    wanted = exact((query, *map(paged_attention.unrounded, cache), *rest), options)
    bound = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 4e-3}
    torch.testing.assert_close(out.double(), wanted, **bound)
    error = out.double() - exact((query, keys, values, *rest), options)
    assert 0 < error.norm() < bound_of_rounding * wanted.norm()
    one = attention(query[:1], *cache, rest[0][:1], torch.tensor([0, 1]).int(), rest[2][:1], **options)
    if rest[1][1] == 1:  # the first sequence has one token
        assert torch.equal(one[0], out[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula_on_a_gpu(name, dtype):
    args, options = drawn(**CASES[name], dtype=dtype)
    there = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    out = attention(*(x.cuda() for x in args), **there).cpu()
    bound = {"rtol": 1e-5, "atol": 5e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(out.double(), exact(args, options), **bound)


def test_without_special_instructions(monkeypatch):
    general = compat.compile_operators("#define TUTTI_GENERIC\n" + source(paged_attention.SOURCE), "tutti_generic")
    monkeypatch.setattr(paged_attention, "kernels", lambda: general)
    args, options = drawn(**CASES["all"], dtype=torch.bfloat16)
    torch.testing.assert_close(attention(*args, **options).double(), exact(args, options), rtol=8e-3, atol=4e-3)


@pytest.mark.skipif(not compat.multiplies_bfloat16(), reason="other tests run these kernels here")
@pytest.mark.parametrize("name", CASES)
def test_without_bfloat16_instructions(monkeypatch, name):
    code = "#define TUTTI_WITHOUT_BFLOAT16\n" + source(paged_attention.SOURCE)
    kernels = compat.compile_operators(code, "tutti_without_bfloat16")
    monkeypatch.setattr(paged_attention, "kernels", lambda: kernels)
    args, options = drawn(**CASES[name], dtype=torch.bfloat16)
    torch.testing.assert_close(attention(*args, **options).double(), exact(args, options), rtol=8e-3, atol=4e-3)


def test_the_formula_is_that_of_pytorch():
    """One sequence in its blocks."""
    args, options = drawn([40], [40], dtype=torch.float64)
    query, keys, values, tables, *_ = args
    slots = (tables[0].long() * BLOCK).repeat_interleave(BLOCK)[:40] + torch.arange(40) % BLOCK
    q, k, v = (x.transpose(0, 1) for x in (query[:40], keys[slots], values[slots]))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scale"], enable_gqa=True)
    torch.testing.assert_close(attention(*args, **options)[:40], wanted.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 50},
        {"sinks": torch.ones(4)},
        {"bias": BIAS},
        {"groups": 4, "width": 80},
        {"heads": 17, "groups": 1},
        {"heads": 16, "groups": 1, "value_width": 96},
    ],
    ids="".join,
)
def test_bits_do_not_depend_on_other_tokens(dtype, options):
    """All tokens of a sequence at once, in chunks, and one by one beside another sequence."""
    length = 150
    args, options = drawn([length, 1], [length, 90], dtype=dtype, **options)
    query, keys, values, tables, _, lengths = args
    whole = attention(*args, **options)
    for first, last in [(0, 7), (7, 71), (71, 140), (140, 141), (141, 150)]:
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        now = torch.tensor([last], dtype=torch.int32)
        part = attention(query[first:last], keys, values, tables[:1], starts, now, **options)
        assert torch.equal(part, whole[first:last])
    alone = attention(query[length:], keys, values, tables[1:], torch.tensor([0, 1]).int(), lengths[1:], **options)
    assert torch.equal(alone[0], whole[length])


def test_bits_do_not_depend_on_threads_or_blocks():
    args, options = drawn([70, 1], [150, 90], dtype=torch.bfloat16)
    query, keys, values, tables, starts, lengths = args
    whole = attention(*args, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(attention(*args, **options), whole)
    finally:
        torch.set_num_threads(threads)
    halves = (2 * tables.unsqueeze(-1) + torch.arange(2)).flatten(1).int()
    args = query, keys, values, halves, starts, lengths
    assert torch.equal(attention(*args, **{**options, "block": BLOCK // 2}), whole)


def test_unused_slots_are_not_read():
    args, options = drawn([20, 1], [20, 70])
    _, keys, values, tables, _, lengths = args
    whole = attention(*args, **options)
    used = torch.zeros(len(keys), dtype=torch.bool)
    for table, length in zip(tables.long(), lengths.tolist(), strict=True):
        at = torch.arange(length)
        used[table[at // BLOCK] * BLOCK + at % BLOCK] = True
    keys[~used], values[~used] = torch.nan, torch.inf
    assert torch.equal(attention(*args, **options), whole)


def test_operands_of_any_strides():
    args, options = drawn([20, 1], [20, 70])
    strange = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in args[:3]]
    fused = torch.cat(args[1:3], 1).split(2, 1)  # keys and values beside each other in memory
    whole = attention(*args, **options)
    assert torch.equal(attention(*strange, *args[3:], **options), whole)
    assert torch.equal(attention(args[0], *fused, *args[3:], **options), whole)


def test_registration():
    for dtype in (torch.float32, torch.float64):
        opcheck(attention.default, *drawn([3, 1], [20, 17], dtype=dtype, sinks=torch.ones(4), bias=BIAS))


def test_operands_that_do_not_fit():
    (query, *rest), options = drawn([3, 1], [20, 17])
    with pytest.raises(ValueError, match=r"query \(7, 4, 30\), keys .*: expected"):
        attention(query[..., :30], *rest, **options)
    with pytest.raises(ValueError, match="heads a multiple of key_heads"):
        attention(query[:, :3], *rest, **options)
    with pytest.raises(ValueError, match="need causal=True"):
        attention(query, *rest, **{**options, "window": 4, "causal": False})


@pytest.mark.starts
def test_blocks_and_tokens_that_there_are_not():
    (query, keys, values, tables, starts, lengths), options = drawn([1, 2], [20, 40])
    for changed, message in (
        ((tables[:, :1], starts, lengths), "20 tokens in 1 blocks of 16"),
        ((tables + 90, starts, lengths), r"block 9\d of a cache of \d+ slots"),
        ((tables, starts + 5, lengths), "tokens 6 to 8 of 6"),
        ((tables, starts, lengths[:1]), "3 starts and 1 lengths of 2 sequences"),
    ):
        with pytest.raises(IndexError, match=message):
            attention(query, keys, values, *changed, **options)
