import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.fx.experimental.proxy_tensor import make_fx

from tutti.nn import random
from tutti.nn.random import bernoulli, between, standard_normal, uniform

CPU = torch.device("cpu")
COUNT = 1 << 19
GOLDEN_LOW = [12942617.0, 5478478.0, 6940722.0, 4659645.0]
GOLDEN_HIGH = [16496321.0, 8723823.0, 11240938.0, 13702063.0]


def words(value):
    return torch.tensor(value, dtype=torch.int64)


def draw(shape, seed=0, step=1, salt=0, sizes=None, strides=None, offset=0):
    """Through the operator, which on a CPU works in blocks."""
    sizes, strides = sizes or [math.prod(shape)], strides or [1]
    args = (list(shape), list(sizes), list(strides), offset)
    return torch.ops.tutti.uniform(words(seed), words(step), salt, *args, device=CPU)


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item()


def chi_square(counts):
    """Deviations from equal counts, in standard deviations of the statistic."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return ((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)).item()


def in_integers(position, seed, step, salt):
    """The formula of the module's docstring in Python integers, times 2^24."""
    mask = 2**32 - 1

    def mix(x):
        for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            x = (x ^ x >> shift) * multiplier & mask
        return x ^ x >> 15

    keys = []
    for start in (0x243F6A88, 0x85A308D3):
        word = start
        for part in (seed, seed >> 32, step, step >> 32):
            word = mix(part & mask ^ word)
        keys.append(mix(word ^ mix(mix(start) ^ salt)))
    high = mix(position >> 32)
    spread = mix(high + (high << 16) & mask)
    return mix(mix(position & mask ^ keys[0] ^ high) ^ keys[1] ^ spread) >> 8


@pytest.mark.parametrize("position", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**44 + 3])
@pytest.mark.parametrize(("seed", "step", "salt"), [(0, 1, 0), (2**40 + 7, 3, 5), (-1, 2**33, 2**31)])
def test_formula(position, seed, step, salt):
    ours = draw((1,), seed, step, salt, offset=position)
    assert ours.item() * 2**24 == in_integers(position, seed, step, salt)


def test_golden_values():
    """A released run must stay reproducible: these numbers never change."""
    x = (draw((4,), seed=2**40 + 7, step=3, salt=5, offset=2**33 + 1) * 2**24).tolist()
    assert x == GOLDEN_HIGH
    assert (draw((4,)) * 2**24).tolist() == GOLDEN_LOW


def test_range_and_resolution():
    u = draw((COUNT,))
    assert u.dtype == torch.float32
    assert 0 <= u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    assert torch.equal(u * 2**24, (u * 2**24).round())


@pytest.mark.parametrize(("seed", "step", "salt", "offset"), [(0, 0, 0, 0), (1, 2, 3, 0), (2**62, 9, 99, 2**40)])
def test_moments_and_bytes(seed, step, salt, offset):
    u = draw((COUNT,), seed, step, salt, offset=offset).double()
    sigma = 1 / math.sqrt(COUNT)
    assert abs(u.mean() - 1 / 2) < 4 * sigma * math.sqrt(1 / 12)
    assert abs(u.var() - 1 / 12) < 4 * sigma * math.sqrt(1 / 180)
    integers = (u * 2**24).long()
    for shift in (0, 8, 16):
        counts = torch.bincount(integers >> shift & 255, minlength=256).double()
        assert abs(chi_square(counts)) < 4


def test_pairs_of_neighbours_fill_the_square():
    u = draw((COUNT, 2))
    cells = (u[:, 0] * 32).long() * 32 + (u[:, 1] * 32).long()
    assert abs(chi_square(torch.bincount(cells, minlength=1024).double())) < 4


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 64, 768, 1024, 4096, 65536])
def test_neighbours_are_uncorrelated(lag):
    u = draw((COUNT,))
    assert abs(correlation(u[lag:], u[:-lag])) < 4 / math.sqrt(COUNT)


@pytest.mark.parametrize("key", ["seed", "step", "salt"])
@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (7, 8), (0, 1 << 16), (3, 3 << 8)])
def test_streams_are_uncorrelated(key, one, other):
    a, b = draw((COUNT,), **{key: one}), draw((COUNT,), **{key: other})
    assert abs(correlation(a, b)) < 4 / math.sqrt(COUNT)
    equal = (a == b).sum().item()
    assert abs(equal - COUNT / 2**24) < 5


def test_same_words_in_other_places_are_other_streams():
    firsts = {draw((4,), a, b, c)[:2].sum().item() for a in (0, 1, 2) for b in (0, 1, 2) for c in (0, 1, 2)}
    assert len(firsts) == 27
    assert not torch.equal(draw((4,), seed=1), draw((4,), seed=1 + 2**32))


def test_high_and_low_halves_of_the_position_differ():
    low, high = draw((COUNT,)), draw((COUNT,), offset=2**32)
    assert abs(correlation(low, high)) < 4 / math.sqrt(COUNT)
    assert (low == high).sum() < 10


def test_across_the_boundary_of_32_bits():
    whole = draw((1000,), offset=2**32 - 300)
    assert torch.equal(whole[:300], draw((300,), offset=2**32 - 300))
    assert torch.equal(whole[300:], draw((700,), offset=2**32))
    far = draw((2, 3), sizes=(2, 3), strides=(2**33, 1), offset=4)
    assert torch.equal(far[1], draw((3,), offset=2**33 + 4))


@st.composite
def slices(draw_from):
    """A tensor of up to three dims, each split as (outer, parts, inner) of which one part is kept."""
    dims = draw_from(st.lists(st.tuples(*[st.sampled_from([1, 2, 3])] * 3), min_size=1, max_size=3))
    parts = [draw_from(st.integers(0, n - 1)) for _, n, _ in dims]
    return dims, parts


@settings(max_examples=150)
@given(slices(), st.sampled_from([0, 12345, 2**31 - 7, 2**32 - 7, 2**45]), st.sampled_from([5, 100, 1 << 16]))
def test_parts_equal_the_slices_of_the_whole(case, offset, block):
    dims, parts = case
    shape = [outer * n * inner for outer, n, inner in dims]
    whole = draw(shape, offset=offset)
    expected = whole.reshape([size for dim in dims for size in dim])
    sizes, strides, start, stride = [], [], offset, 1
    for (outer, n, inner), part in zip(reversed(dims), reversed(parts), strict=True):
        sizes[:0], strides[:0] = [outer, inner], [stride * n * inner, stride]
        start += part * inner * stride
        stride *= outer * n * inner
    for i, part in enumerate(parts):
        expected = expected.select(2 * i + 1, part)
    local = [outer * inner for outer, _, inner in dims]
    expected = expected.reshape(local)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(random, "_BLOCK", block)
        assert torch.equal(draw(local, sizes=sizes, strides=strides, offset=start), expected)
    pure = uniform(words(0), words(1), 0, local, sizes, strides, start)
    assert torch.equal(pure, expected)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (70_000,), (3, 70_001)])
def test_any_shape(shape):
    ours = draw(shape)
    assert ours.shape == shape
    assert torch.equal(ours, uniform(words(0), words(1), 0, shape))


def test_digits_that_do_not_fit_the_shape():
    with pytest.raises(ValueError, match=r"sizes \[2, 4\] and strides \[4, 1\] do not number the 6 elements"):
        draw((2, 3), sizes=(2, 4), strides=(4, 1))


def test_bernoulli_rate():
    u = draw((COUNT,))
    for p in (0.1, 0.5, 0.9):
        mask = bernoulli(u, p)
        assert mask.dtype == torch.bool
        assert abs(mask.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / COUNT)
    assert not bernoulli(u, 0.0).any() and bernoulli(u, 1.0).all()


def test_between():
    x = between(draw((COUNT,)), -3.0, 5.0)
    assert x.min() >= -3 and x.max() <= 5
    assert abs(x.double().mean() - 1) < 4 * 8 * math.sqrt(1 / 12 / COUNT)


def test_standard_normal():
    """First four moments, and the share of every interval of half a standard deviation."""
    z = standard_normal(draw((COUNT,))).double()
    assert z.isfinite().all()
    sigma = 1 / math.sqrt(COUNT)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - moment) < 4 * sigma * math.sqrt(variance)
    edges = torch.arange(-3, 3.1, 0.5, dtype=torch.float64)
    shares = torch.diff(torch.special.ndtr(edges))
    for low, high, share in zip(edges[:-1], edges[1:], shares, strict=True):
        inside = ((z >= low) & (z < high)).double().mean()
        assert abs(inside - share) < 4 * sigma * math.sqrt(share * (1 - share))


def test_standard_normal_is_symmetric_and_finite_at_the_ends():
    ends = standard_normal(torch.tensor([0.0, 1 - 2**-24]))
    assert ends[0] == -ends[1] and 5.4 < ends[1] < 5.43


def test_traced_formula_and_fake():
    args = (0, [4, 6], [4, 6], [12, 1], 3)
    graph = make_fx(lambda seed, step: uniform(seed, step, *args), tracing_mode="fake")(words(0), words(1))
    for seed, step in ((0, 1), (-5, 2**33)):
        expected = torch.ops.tutti.uniform(words(seed), words(step), *args, device=CPU)
        assert torch.equal(graph(words(seed), words(step)), expected)
    torch.library.opcheck(torch.ops.tutti.uniform, (words(0), words(1), *args), {"device": CPU})
