"""Each algorithm on single matrices, against its definition."""

import itertools

import pytest
import torch

from tutti.compress.methods import awq, gptq, hqq, smooth
from tutti.compress.statistics import Statistics
from tutti.nn.quantized.scheme import Parts, Scheme

SCHEMES = [Scheme(4, 16), Scheme(3, None), Scheme(2, 16, False), Scheme(4, 32, False), Scheme(8, None)]


def drawn(n=6, k=64, tokens=200, seed=0):
    """A weight, and correlated inputs with a few outlier channels."""
    draw = torch.Generator().manual_seed(seed)
    w, mix = torch.randn(n, k, generator=draw), torch.randn(k, k, generator=draw) / 8 + torch.eye(k)
    x = torch.randn(tokens, k, generator=draw) @ mix
    x[:, ::17] *= 8
    statistics = Statistics(k)
    statistics.add(x)
    return w, x, statistics


def loss(w, approximation, x):
    return float(((approximation - w) @ x.T).square().sum())


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics():
    w, x, statistics = drawn()
    parts = Statistics(64)
    for rows in (x[:3], x[3:3], x[3:150], x[150:]):
        parts.add(rows)
    for moments in (statistics, parts):
        torch.testing.assert_close(moments.gram, x.T @ x, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(moments.total, x.abs().sum(0))
        assert torch.equal(moments.most, x.abs().amax(0)) and moments.count == 200
    rounded = Scheme(4, 16).rounded(w)
    assert statistics.error(w, rounded) == pytest.approx((loss(w, rounded, x) / float((w @ x.T).square().sum())) ** 0.5)
    s = torch.rand(64) + 0.5
    divided, direct = statistics.divided(s), Statistics(64)
    direct.add(x / s)
    torch.testing.assert_close(divided.gram, direct.gram, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(divided.most, direct.most)


# -- GPTQ -------------------------------------------------------------------------------------------------------------


def naive(w, scheme, gram, damping, order):
    """Optimal brain quantization in float64, a column at a time in a fixed order: after each column, those to come
    change by the inverse of the second moments of the columns that are left, which is reduced by Gaussian elimination.
    """
    work, gram = w.double().clone(), gram.double().clone()
    k, group = w.shape[1], scheme.group or w.shape[1]
    dead = gram.diagonal() == 0
    gram.diagonal()[dead] = 1
    mean = gram.diagonal()[~dead].mean()
    turn = torch.argsort(gram.diagonal(), descending=True, stable=True) if order else torch.arange(k)
    inverse = torch.linalg.inv(gram + damping * mean * torch.eye(k))
    scales, zeros = scheme.grid(w)
    codes = torch.zeros_like(w, dtype=torch.uint8)
    for j in turn.tolist():
        at = slice(j // group, j // group + 1)
        if not order and scheme.group and j % group == 0:
            fresh = scheme.grid(work[:, j : j + group].float())
            scales[:, at] = fresh[0]
            if zeros is not None:
                zeros[:, at] = fresh[1]
        own = scales[:, at], None if zeros is None else zeros[:, at]
        codes[:, j] = scheme.codes(work[:, j : j + 1].float(), *own)[:, 0]
        error = work[:, j] - scheme.dequantize(Parts(codes[:, j : j + 1], *own))[:, 0]
        work -= torch.outer(error, inverse[j] / inverse[j, j])
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j], inverse[:, j], inverse[j, j] = 0, 0, 1  # it is fixed
    return Parts(codes, scales, zeros)


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gptq_is_the_naive_loop(scheme, order):
    w, x, statistics = drawn()
    for block in (1, 24, 128):
        parts = gptq.quantize(w, scheme, statistics.gram, order=order, block=block)
        expected = naive(w, scheme, statistics.gram, 0.01, order)
        assert float((parts.codes != expected.codes).float().mean()) <= 0.01, "but for ties"
        torch.testing.assert_close(parts.scales, expected.scales, rtol=1e-3, atol=1e-4)
        assert loss(w, scheme.dequantize(parts), x) == pytest.approx(loss(w, scheme.dequantize(expected), x), rel=0.02)


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gptq_is_never_worse_than_the_nearest(scheme, order):
    for seed in range(4):
        w, x, statistics = drawn(seed=seed)
        parts = gptq.quantize(w, scheme, statistics.gram, order=order)
        assert loss(w, scheme.dequantize(parts), x) < loss(w, scheme.rounded(w), x)


def test_gptq_comes_near_the_optimum_of_a_tiny_case():
    scheme = Scheme(2, None)
    w, x, statistics = drawn(1, 5, 50)
    parts = scheme.quantize(w)
    best = min(loss(w, scheme.dequantize(Parts(torch.tensor([codes], dtype=torch.uint8), parts.scales)), x)
               for codes in itertools.product(range(4), repeat=5))  # fmt: skip
    gptq_loss = loss(w, scheme.dequantize(gptq.quantize(w, scheme, statistics.gram)), x)
    assert best <= gptq_loss * 1.0001 and gptq_loss <= 2 * best <= loss(w, scheme.rounded(w), x) * 2


def test_gptq_with_inputs_that_are_always_0():
    w, x, _ = drawn()
    x[:, 5:20] = 0
    statistics = Statistics(64)
    statistics.add(x)
    scheme = Scheme(4, 16)
    dequantized = scheme.dequantize(gptq.quantize(w, scheme, statistics.gram))
    assert bool(dequantized.isfinite().all()) and torch.equal(dequantized[:, 5:16], scheme.rounded(w)[:, 5:16])
    assert loss(w, dequantized, x) < loss(w, scheme.rounded(w), x)
    nothing = gptq.quantize(w, scheme, torch.zeros(64, 64))
    assert torch.equal(nothing.codes, scheme.quantize(w).codes)


def test_gptq_of_fewer_tokens_than_inputs():
    """The moments have no inverse: damping makes one."""
    w, x, _ = drawn(tokens=10)
    statistics = Statistics(64)
    statistics.add(x[:, :1] * torch.ones(64))
    dequantized = Scheme(4, 16).dequantize(gptq.quantize(w, Scheme(4, 16), statistics.gram, damping=1e-9))
    assert bool(dequantized.isfinite().all())
    with pytest.raises(ValueError, match="not positive"):
        gptq.factor(torch.full((2, 2), float("nan")), 0.1)


# -- AWQ --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
def test_awq_takes_the_best_of_its_grid(scheme):
    w, x, statistics = drawn()
    other = drawn(seed=1)[0]
    scales = awq.search({"a": w, "b": other}, {"a": scheme, "b": scheme}, statistics)
    mean, best = x.abs().mean(0), (float("inf"), torch.ones(64))
    for step in range(20):
        s = mean ** (step / 20)
        s = s / (s.max() * s.min()) ** 0.5
        total = sum(float(((x / s) @ scheme.rounded(y * s).T - x @ y.T).square().sum()) for y in (w, other))
        best = min(best, (total, s), key=lambda item: item[0])
    torch.testing.assert_close(torch.ones(64) if scales is None else scales, best[1])
    nearest = sum(loss(y, scheme.rounded(y), x) for y in (w, other))
    assert best[0] <= nearest and (scales is not None or best[0] == pytest.approx(nearest))


def test_awq_helps_where_channels_are_outliers():
    w, _, statistics = drawn()
    assert awq.search({"a": w}, {"a": Scheme(3, 64)}, statistics) is not None
    assert awq.search({"a": w}, {"a": Scheme(3, 64)}, Statistics(64)) is None, "no data"


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
def test_awq_cuts_the_range_of_each_group_best(scheme):
    w, x, statistics = drawn()
    clipped = awq.clipped(w, scheme, statistics.gram)
    size = scheme.group or 64
    for row in range(len(w)):
        for at in range(0, 64, size):
            part, inputs = w[row : row + 1, at : at + size], x[:, at : at + size]
            one = Scheme(scheme.bits, None, scheme.symmetric)
            losses = []
            for step in range(11):
                grid = one.grid(part * (1 - step / 20))
                losses.append(loss(part, one.dequantize(Parts(one.codes(part, *grid), *grid)), inputs))
            got = loss(part, scheme.dequantize(clipped)[row : row + 1, at : at + size], inputs)
            assert got == pytest.approx(min(losses), rel=1e-3)


# -- SmoothQuant ------------------------------------------------------------------------------------------------------


def test_smoothquant_factors():
    w, x, statistics = drawn()
    other = drawn(seed=1)[0]
    for strength in (0.0, 0.5, 1.0):
        s = smooth.factors([w, other], statistics.most, strength)
        largest = torch.maximum(w.abs().amax(0), other.abs().amax(0))
        torch.testing.assert_close(s, statistics.most**strength / largest ** (1 - strength))
        torch.testing.assert_close((x.double() / s) @ (w.double() * s).T, x.double() @ w.double().T)
    ranges = (
        (statistics.most / smooth.factors([w], statistics.most, 0.5)),
        (w.abs().amax(0) * smooth.factors([w], statistics.most, 0.5)),
    )
    torch.testing.assert_close(*ranges)  # half of each: the ranges are equal
    most = statistics.most.clone()
    most[3] = 0
    assert float(smooth.factors([w], most)[3]) == 1


# -- HQQ --------------------------------------------------------------------------------------------------------------


def test_hqq_shrinks_by_its_proximal_formula():
    """shrink is near the minimum of |e|^p / (beta p) + (e - x)^2 / 2 for large x, and 0 for small ones."""
    grid = torch.linspace(-4, 4, 160_001)
    beta, power = 10.0, 0.7
    for x in (-3.0, -1.0, -0.01, 0.0, 0.02, 0.5, 2.0):
        cost = grid.abs() ** power / (beta * power) + (grid - x) ** 2 / 2
        best = float(grid[cost.argmin()])
        assert float(hqq.shrink(torch.tensor(x), beta, power)) == pytest.approx(best, abs=0.02)


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=str)
def test_hqq_is_nowhere_worse_by_its_norm(scheme):
    w = drawn(32, 64)[0]
    w[::3, ::9] *= 6
    fitted, nearest = scheme.dequantize(hqq.quantize(w, scheme)), scheme.rounded(w)
    norms = [((x - w).abs() ** 0.7).unflatten(1, (scheme.groups(64), -1)).sum(2) for x in (fitted, nearest)]
    assert bool((norms[0] <= norms[1] + 1e-4).all()) and float(norms[0].sum()) < 0.99 * float(norms[1].sum())


def test_hqq_alternates_two_steps():
    scheme, w = Scheme(3, None, False), drawn(1, 64)[0]
    w[0, ::9] *= 4
    scales, zeros = scheme.grid(w)
    scale, zero, beta = scales.double(), zeros.double(), 10.0
    for step in range(40):
        q = (w / scale + zero).round().clamp(0, 7)
        x = w - scale * (q - zero)
        e = x.sign() * (x.abs() - x.abs().clamp(min=1e-12) ** -0.3 / beta).clamp(min=0)
        if step < 20:
            zero = (q - (w - e) / scale).mean()
        else:
            zero = zero.round()
            scale = ((w - e) * (q - zero)).sum() / ((q - zero) ** 2).sum()
        beta *= 1.01
    parts = hqq.quantize(w, scheme)
    assert int(parts.zeros) == int(zero) and float(parts.scales) == pytest.approx(float(scale), rel=1e-4)
