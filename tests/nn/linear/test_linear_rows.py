"""Linear layers for few rows, of floats, int8 and int4, against their formulas; bits that depend on nothing else."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.library import opcheck

import tutti
from tutti import compat
from tutti.ir.spec import Spec
from tutti.nn.compiled import source
from tutti.nn.linear import linear_int4, linear_int8, linear_rows
from tutti.nn.linear.linear_int4 import dequantize_int4, quantize_int4
from tutti.nn.linear.linear_int8 import dequantize_int8, quantize_int8

ops = torch.ops.tutti
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def drawn(m, n, k, dtype, bias=True):
    torch.manual_seed(0)
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype) / k**0.5, torch.randn(n).to(dtype) if bias else None


def close(actual, wanted, bound):
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted.double()).norm() <= bound * wanted.double().norm()


@BOTH
@pytest.mark.parametrize("m, n, k", [(1, 64, 96), (2, 7, 33), (3, 40, 1), (5, 1, 130), (50, 130, 1100), (0, 3, 4),
                                     (20, 40, 0)])  # fmt: skip
@pytest.mark.starts
def test_equals_a_linear_layer(m, n, k, dtype):
    x, weight, bias = drawn(m, n, k, dtype)
    for b in (None, bias):
        y = ops.linear_rows(x, weight, b)
        assert y.dtype == dtype
        close(y, F.linear(x.double(), weight.double(), None if b is None else b.double()), BOUND[dtype])


@BOTH
def test_without_special_instructions(monkeypatch, dtype):
    x, weight, bias = drawn(6, 50, 192, dtype)
    general = compat.compile_operators("#define TUTTI_GENERIC\n" + source(linear_rows.SOURCE), "tutti_generic")
    q8, q4 = quantize_int8(weight), quantize_int4(weight)
    own = ops.linear_rows(x, weight, bias), ops.linear_int8(x, *q8, bias), ops.linear_int4(x, *q4, bias)
    for module in (linear_rows, linear_int8, linear_int4):
        monkeypatch.setattr(module, "kernels", lambda: general)
        monkeypatch.setattr(module, "rounds", general.rounds)
    generic = ops.linear_rows(x, weight, bias), ops.linear_int8(x, *q8, bias), ops.linear_int4(x, *q4, bias)
    for a, b in zip(own, generic, strict=True):
        close(a, b, BOUND[dtype])
    close(ops.linear_int8(x, *q8, bias, rounded=True), generic[1], 0.02)


@pytest.mark.skipif(not compat.multiplies_bfloat16(), reason="other tests run these kernels here")
def test_without_bfloat16_instructions(monkeypatch):
    code = "#define TUTTI_WITHOUT_BFLOAT16\n" + source(linear_rows.SOURCE)
    kernels = compat.compile_operators(code, "tutti_without_bfloat16")
    monkeypatch.setattr(linear_rows, "kernels", lambda: kernels)
    monkeypatch.setattr(linear_rows, "tiles", lambda: False)
    for n, k in ((1, 2), (33, 101), (47, 1090), (64, 3000)):
        x, weight, bias = drawn(130, n, k, torch.bfloat16)
        y = ops.linear_rows(x, weight, bias)
        close(y, F.linear(x.double(), weight.double(), bias.double()), BOUND[torch.bfloat16])
        for rows in (slice(0, 1), slice(3, 5), slice(5, 8), slice(20, 71)):
            assert torch.equal(ops.linear_rows(x[rows], weight, bias), y[rows])


@pytest.mark.parametrize("m", [1, 31, 33, 70])
@pytest.mark.skipif(not compat.multiplies_bfloat16(), reason="needs bfloat16 instructions")
def test_by_tiles(monkeypatch, m):
    x, weight, bias = drawn(m, 72, 448, torch.bfloat16)
    q8, q4 = quantize_int8(weight), quantize_int4(weight)
    own = ops.linear_rows(x, weight, bias), ops.linear_int8(x, *q8, bias), ops.linear_int4(x, *q4, bias)
    for module in (linear_rows, linear_int8, linear_int4):
        monkeypatch.setattr(module, "tiles", lambda: True)
    for linear, operands, wanted in zip(
        (ops.linear_rows, ops.linear_int8, ops.linear_int4), ((weight,), q8, q4), own, strict=True
    ):
        y = linear(x, *operands, bias)
        close(y, wanted, BOUND[torch.bfloat16])
        assert torch.equal(linear(x[m // 2 :], *operands, bias), y[m // 2 :])


@BOTH
@pytest.mark.parametrize("kind", ["floats", "int8", "int8 rounded", "int4", "int4 rounded"])
def test_bits_do_not_depend_on_other_rows(kind, dtype):
    x, weight, bias = drawn(71, 100, 1344, dtype)
    options = {"rounded": True} if "rounded" in kind else {}
    name = kind.split()[0]
    operands = {"floats": lambda w: [w], "int8": quantize_int8, "int4": quantize_int4}[name](weight)
    linear = {"floats": ops.linear_rows, "int8": ops.linear_int8, "int4": ops.linear_int4}[name]
    whole = linear(x, *operands, bias, **options)
    for rows in (slice(0, 1), slice(3, 5), slice(5, 8), slice(20, 71)):
        assert torch.equal(linear(x[rows], *operands, bias, **options), whole[rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, *operands, bias, **options), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("n, k", [(1, 2), (16, 30), (17, 32), (47, 1090), (64, 1026), (33, 101), (1100, 96)])
def test_bits_of_bfloat16_are_those_of_single_rows(n, k):
    """For every number of rows, with depths and widths that are no multiples of a vector."""
    x, weight, bias = drawn(130, n, k, torch.bfloat16)
    single = torch.cat([ops.linear_rows(row, weight, bias) for row in x.split(1)])
    close(single, F.linear(x.double(), weight.double(), bias.double()), BOUND[torch.bfloat16])
    for m in [*range(2, 20), 25, 63, 130]:
        assert torch.equal(ops.linear_rows(x[:m], weight, bias), single[:m])
    wider = torch.full((130, k + 40), torch.nan, dtype=torch.bfloat16)
    wider[:, :k] = x
    for m in (5, 30):  # numbers beside the rows are not read
        assert torch.equal(ops.linear_rows(wider[:m, :k], weight, bias), single[:m])


@BOTH
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind, n, k, group, zeros", [
    ("int8", 1, 3, None, False), ("int8", 47, 1090, None, False), ("int8", 64, 512, None, False),
    ("int4", 33, 192, 64, True), ("int4", 70, 1152, 32, True), ("int4", 16, 2176, 128, False),
])  # fmt: skip
def test_bits_of_quantized_layers_are_those_of_single_rows(kind, n, k, group, zeros, rounded, dtype):
    """For every number of rows, with depths and widths that are no multiples of a vector, and more groups than one
    load of scales has."""
    x, weight, bias = drawn(70, n, k, dtype)
    if kind == "int8":
        operands, linear, dequantize = quantize_int8(weight), ops.linear_int8, dequantize_int8
    else:
        operands, linear, dequantize = quantize_int4(weight, group, zeros), ops.linear_int4, dequantize_int4
    run = partial(linear, rounded=rounded)
    single = torch.cat([run(row, *operands, bias=bias) for row in x.split(1)])
    wanted = F.linear(x.double(), dequantize(*operands).double(), bias.double())
    close(single, wanted, 0.02 if rounded else BOUND[dtype])
    for m in [*range(2, 20), 25, 70]:
        assert torch.equal(run(x[:m], *operands, bias=bias), single[:m])


@BOTH
@pytest.mark.parametrize("m", [1, 4, 33])
@pytest.mark.parametrize("k", [64, 1100, 2048])
def test_int8_is_exact_in_the_weight(m, k, dtype):
    x, weight, bias = drawn(m, 50, k, dtype)
    q, scales = quantize_int8(weight)
    wanted = F.linear(x.double(), dequantize_int8(q, scales.double()), bias.double())
    close(ops.linear_int8(x, q, scales, bias), wanted, BOUND[dtype])
    close(ops.linear_int8(x, q, scales, bias, rounded=True), wanted, 0.01)
    close(ops.linear_int8(x, q, scales, bias, rounded=True),
          linear_int8.reference(x, q, scales, bias, rounded=True), BOUND[dtype] / 2)  # fmt: skip


@BOTH
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("m", [0, 1, 20])
def test_nothing_is_added_up(m, rounded, dtype):
    bias = torch.randn(3).to(dtype)
    weight = torch.zeros(3, 0, dtype=torch.int8), torch.ones(3)
    y = ops.linear_int8(torch.zeros(m, 0, dtype=dtype), *weight, bias, rounded=rounded)
    assert torch.equal(y, bias.expand(m, 3))


def test_int8_is_the_nearest():
    _, weight, _ = drawn(1, 50, 100, torch.float32)
    weight[3] = 0
    q, scales = quantize_int8(weight)
    assert q.abs().amax(1).eq(127).sum() == 49 and q[3].eq(0).all()
    assert ((dequantize_int8(q, scales) - weight).abs() <= scales.unsqueeze(1) / 2 * 1.001).all()


@BOTH
@pytest.mark.parametrize("m", [1, 4, 33])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", [False, True])
def test_int4_equals_its_dequantized_weight(m, group, zeros, dtype):
    x, weight, bias = drawn(m, 50, 1280, dtype)
    quantized = quantize_int4(weight, group, zeros)
    w = dequantize_int4(*quantized)
    wanted = F.linear(x.double(), w.to(dtype).double(), bias.double())
    close(ops.linear_int4(x, *quantized, bias), wanted, BOUND[dtype])
    exact = F.linear(x.double(), w.double(), bias.double())
    rounded = ops.linear_int4(x, *quantized, bias, rounded=True)
    close(rounded, exact, 0.01)
    close(rounded, linear_int4.reference(x, *quantized, bias, rounded=True), BOUND[dtype] / 2)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", [False, True])
def test_int4_is_near(group, zeros):
    _, weight, _ = drawn(1, 20, 256, torch.float32)
    weight[3] = 0
    q, scales, offset = quantize_int4(weight, group, zeros)
    assert q.shape == (20, 128) and (offset is not None) == zeros
    error = (dequantize_int4(q, scales, offset) - weight).abs().unflatten(1, (-1, group)).amax(2)
    # without zeros the other sign ends at 7 scales: a number of up to 8 scales may be a whole scale away
    assert (error <= scales.abs() * (0.501 if zeros else 1.001)).all()
    assert dequantize_int4(q, scales, offset)[3].eq(0).all()


def test_packing():
    q = torch.randint(16, (3, 128)).to(torch.uint8)
    packed = linear_int4.pack(q)
    assert torch.equal(linear_int4.unpack(packed), q)
    assert packed[0, 0] == q[0, 0] + 16 * q[0, 32] and packed[0, 32] == q[0, 64] + 16 * q[0, 96]


@BOTH
def test_operands_of_any_strides(dtype):
    x, weight, bias = drawn(5, 24, 96, dtype)
    whole = ops.linear_rows(x, weight, bias)
    assert torch.equal(ops.linear_rows(x.t().contiguous().t(), weight.t().contiguous().t(), bias), whole)
    wide = torch.cat([x, x], 1), torch.cat([weight, weight], 1), torch.stack([bias, bias], 1)
    assert torch.equal(ops.linear_rows(wide[0][:, 96:], wide[1][:, 96:], wide[2][:, 1]), whole)


def test_registration():
    x, weight, bias = drawn(3, 8, 128, torch.float32)
    opcheck(ops.linear_rows.default, (x, weight, bias))
    opcheck(ops.linear_rows.default, (x.double(), weight.double(), None))
    opcheck(ops.linear_int8.default, (x, *quantize_int8(weight), bias))
    opcheck(ops.linear_int4.default, (x, *quantize_int4(weight), bias), {"rounded": True})


def test_what_does_not_fit():
    x, weight, _ = drawn(3, 8, 96, torch.float32)
    with pytest.raises(RuntimeError):
        ops.linear_rows(x[:, :5], weight, None)
    with pytest.raises(ValueError, match=r"x \(3, 5\), weight \(8, 96\) torch.int8"):
        ops.linear_int8(x[:, :5], *quantize_int8(weight))
    with pytest.raises(ValueError, match="groups of 48 along 96 numbers; expected groups of 32, 64, 128"):
        quantize_int4(weight, 48)
    with pytest.raises(ValueError, match=r"groups of 32 along 96 numbers; expected .* a multiple of 64"):
        quantize_int4(weight, 32)
    with pytest.raises(ValueError, match=r"x \(3, 96\), weight \(8, 64\) torch.uint8"):
        ops.linear_int4(x, *quantize_int4(drawn(3, 8, 128, torch.float32)[1]))


def graph_of(rows, right="t", bias=None, kind="placeholder"):
    graph = fx.Graph()
    aten = torch.ops.aten
    x, w, b = (graph.placeholder(name) for name in "xwb")
    stored = w if kind == "placeholder" else graph.call_function(aten.relu.default, (w,))
    turned = graph.call_function(aten.t.default, (stored,)) if right == "t" else w
    call = (graph.call_function(aten.addmm.default, (b, x, turned)) if bias
            else graph.call_function(aten.mm.default, (x, turned)))  # fmt: skip
    graph.output((call,))
    shapes = {x: (rows, 4), w: (8, 4) if right == "t" else (4, 8), stored: (8, 4), turned: (4, 8), b: bias or (8,)}
    for node, shape in shapes.items():
        node.meta["val"] = Spec(shape, torch.float32)
    return graph, call


@pytest.mark.parametrize("options, replaced", [
    (dict(rows=4), True), (dict(rows=4, bias=(8,)), True), (dict(rows=4, bias=(4, 8)), False),
    (dict(rows=4, right="plain"), False), (dict(rows=65), False), (dict(rows=4, kind="computed"), False),
])  # fmt: skip
def test_which_products_of_a_graph_are_replaced(options, replaced):
    graph, call = graph_of(**options)
    linear_rows.use(graph)
    assert (call.target is ops.linear_rows.default) == replaced
    if replaced:
        assert [None if a is None else a.name for a in call.args] == ["x", "w", "b" if "bias" in options else None]
    linear_rows.use(graph, rows=torch.inf)
    assert (call.target is ops.linear_rows.default) == (replaced or options["rows"] == 65)


def test_products_of_a_graph_with_a_paged_cache():
    linear = torch.nn.Linear(16, 64, bias=False)
    keys = torch.randn(32, 2, 16)
    tables, starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0, 3], [20]))

    def attend(x):
        query = linear(x).unflatten(1, (4, 16))
        return ops.paged_attention(query, keys, keys, tables, starts, lengths, block=16, scale=0.25)

    x = torch.randn(3, 16)
    fn = tutti.function(attend, x, store=tutti.Store(linear=linear), cluster="cpu:1", plan="single", level="O1")
    torch.testing.assert_close(fn(x), attend(x).detach())
    assert ops.linear_rows.default in [node.target for node in fn.program.graph.nodes]
