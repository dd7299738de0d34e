"""The Triton kernels compute what the formulas compute: on a GPU, or in Triton's interpreter where there is none.

The interpreter needs triton 3.7, and `TRITON_INTERPRET=1` in the environment. It rounds to bfloat16 otherwise than a
GPU, so bfloat16 is tested on a GPU only.
"""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", minversion=None if GPU else "3.7")

from tutti.nn import rows, rows_joined, rows_triton  # noqa: E402
from tutti.nn.attention import paged_attention, paged_write  # noqa: E402
from tutti.nn.attention.paged_attention_triton import attend, parts_of  # noqa: E402
from tutti.nn.linear import linear_quantized_triton, linear_rows_triton, linears_rows, weight_kinds  # noqa: E402
from tutti.nn.loss import linear_cross_entropy  # noqa: E402
from tutti.nn.loss.linear_cross_entropy_triton import differentiate  # noqa: E402
from tutti.nn.quantized.quantized_linear import QuantizedLinear, layout  # noqa: E402
from tutti.nn.quantized.scheme import Scheme  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
BLOCK = 16


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 2e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


ATTENTION = {
    "decoding": ([1, 1, 1], [200, 3, 65], 8, 2, 64, 64, 0, {}),
    "decoding with sinks": ([1, 1, 1], [200, 3, 65], 8, 2, 64, 64, 0, {"sinks": True}),
    "decoding in a window": ([1, 1, 1], [200, 3, 65], 8, 2, 64, 64, 0, {"window": 70}),
    "an empty sequence, odd widths": ([2, 0, 1], [200, 0, 65], 8, 8, 24, 40, 0, {"softcap": 5.0}),
    "padding": ([2, 0, 1], [200, 0, 65], 8, 8, 24, 40, 2, {}),
    "a bias": ([1, 1], [130, 4], 8, 8, 64, 64, 0, {"bias": True}),
    "not causal": ([1, 2], [130, 40], 8, 1, 64, 64, 0, {"causal": False}),
    "prompts": ([20, 0, 1, 70], [33, 0, 65, 100], 8, 2, 64, 64, 3, {}),
    "prompts in a window": ([20, 0, 1, 70], [33, 0, 65, 100], 8, 2, 64, 64, 3, {"window": 30, "sinks": True}),
    "prompts, not causal": ([20, 3], [33, 50], 8, 4, 64, 64, 0, {"causal": False}),
    "prompts with a bias": ([20, 3], [33, 50], 8, 4, 64, 64, 0, {"bias": True, "softcap": 3.0}),
    "twelve heads of a key head": ([20, 3], [33, 50], 12, 1, 64, 64, 0, {}),
}


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_paged_attention(case, dtype, parts):
    counts, lengths, heads, groups, width, value_width, padding, options = ATTENTION[case]
    sequences, blocks = len(counts), -(-max(lengths) // BLOCK) + 1
    query = randn(sum(counts) + padding, heads, width, dtype=dtype)
    keys, values = (randn(sequences * blocks * BLOCK, groups, w, dtype=dtype) for w in (width, value_width))
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).int().to(DEVICE)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=DEVICE)
    places = tables, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    options = {"window": 0, "softcap": 0.0, "causal": True, **options, "block": BLOCK, "scale": 0.1}
    options["sinks"] = randn(heads) if "sinks" in options else None
    options["bias"] = randn(heads, 40) if "bias" in options else None
    got = attend(query, keys, values, *places, parts=parts, **options)
    close(got, paged_attention.reference(query, keys, values, *places, **options))


@pytest.mark.parametrize(
    ("programs", "longest", "parts"), [(8, 4096, 32), (8, 64, 1), (64, 4096, 4), (512, 4096, 1), (8, 300, 4)]
)
def test_few_long_sequences_are_divided_into_parts(programs, longest, parts):
    assert parts_of(programs, 132, longest) == parts


NORMS = {
    "Llama": (True, False, 1e-6, 0.0, False, False),
    "Gemma": (True, False, 1e-6, 1.0, True, False),
    "no weight": (False, False, 1e-5, 0.0, False, False),
    "layer norm": (True, True, 1e-5, 0.0, True, True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NORMS)
def test_norms(case, dtype):
    has_weight, has_bias, *options = NORMS[case]
    x, added = randn(2, 3, 80, dtype=dtype), randn(2, 3, 80, dtype=dtype)
    weight = randn(80, dtype=dtype) if has_weight else None
    bias = randn(80, dtype=dtype) if has_bias else None
    close(rows_triton.norm(x, None, weight, bias, *options), rows.norm_reference(x, weight, bias, *options))
    total = x.clone()
    got = rows_triton.norm(total, added, weight, bias, *options)
    assert torch.equal(total, x + added)
    close(got, rows.norm_reference(x + added, weight, bias, *options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", sorted(rows.GATES))
def test_gated_units(activation, dtype):
    gate, up = randn(3, 2000, dtype=dtype)[:, :1500], randn(3, 1500, dtype=dtype)
    close(rows_triton.glu(gate, up, activation), rows.glu_reference(gate, up, activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_embeddings_and_writes(dtype):
    q, k = (randn(1, 5, heads, 24, dtype=dtype).transpose(1, 2) for heads in (8, 2))
    v, cos, sin = randn(5, 2, 16, dtype=dtype), randn(1, 1, 5, 24, dtype=dtype), randn(1, 1, 5, 24, dtype=dtype)
    slots = torch.tensor([3, 7, -1, 9, 20], device=DEVICE)
    rotated = rows_triton.rotary(q, cos, sin)
    assert rotated.stride() == q.stride()
    close(rotated, rows.rotary_reference(q, cos, sin))
    ours, wanted = ([randn(40, 2, w, dtype=dtype) * 0 for w in (24, 16)] for _ in range(2))
    got = rows_triton.rotary_write(q, k, v, cos, sin, *ours, slots)
    close(got, rows_joined.rotary_write_reference(q, k, v, cos, sin, *wanted, slots))
    close(ours[0], wanted[0])
    assert torch.equal(ours[1], wanted[1])
    cache = torch.zeros_like(ours[1])
    rows_triton.write(cache, v, slots)
    assert torch.equal(cache, wanted[1])
    reference = torch.zeros_like(cache)
    paged_write.reference(reference, v, slots)
    assert torch.equal(cache, reference)


@pytest.mark.parametrize("count", [1, 3, 16, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers_of_one_x(dtype, count):
    x = randn(count, 300, dtype=dtype)
    weights = [randn(n, 300, dtype=dtype) for n in (50, 7, 40)]
    biases: list[torch.Tensor | None] = [randn(len(w), dtype=dtype) for w in weights]
    for layers in (1, 2, 3):
        for each in (biases[:layers], [None] * layers):
            tile = linear_rows_triton.tile_of(count, weights[:layers]) or (32, 128, 4, 4)
            got = linear_rows_triton.linears(x, weights[:layers], each, tile)
            for ours, theirs in zip(got, linears_rows.linears_reference(x, weights[:layers], each), strict=True):
                close(ours / 20, theirs / 20)
    unit = x, weights[0], randn(50, 300, dtype=dtype), "silu"
    tile = linear_rows_triton.tile_of(count, unit[1:3], gated=True) or (32, 128, 4, 4)
    close(linear_rows_triton.gated(*unit, tile) / 400, linears_rows.gated_reference(*unit) / 400)


def test_tiles_depend_on_the_rows_and_on_the_size_of_a_layer():
    small, large = (torch.empty(n, 1, dtype=torch.bfloat16) for n in (8, linear_rows_triton.MANY))
    tile_of = linear_rows_triton.tile_of
    assert tile_of(1, [small]) != tile_of(1, [large])
    assert tile_of(2, [small]) is None  # cuBLAS
    assert tile_of(2, [small] * 3) == tile_of(16, [small] * 3) != tile_of(17, [small] * 3)
    assert tile_of(65, [small] * 3) is None
    assert tile_of(2, [small.float()] * 3) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [3, 128, 20000])
def test_cross_entropy_and_its_gradients(classes, dtype):
    """Rows lie apart from each other; one has no label, and one a class that is masked."""
    logits = (4 * randn(5, classes + 8, dtype=dtype))[:, :classes]
    logits[1, 0] = -torch.inf
    labels = torch.randint(classes, (5,), device=DEVICE)
    labels[2], labels[3] = -1, classes - 1
    lse, picked = torch.logsumexp(logits.float(), 1), logits.float().gather(1, labels.clamp(0).unsqueeze(1)).squeeze(1)
    by_lse, by_picked = randn(5), randn(5)
    wanted = logits.float().softmax(1) * by_lse.unsqueeze(1)
    for row in (0, 1, 3, 4):
        wanted[row, labels[row]] += by_picked[row]
    outputs = torch.empty(2, 5, device=DEVICE)
    differentiate(logits, labels, by_lse, by_picked, outputs[0], outputs[1])
    close(outputs[0], lse)
    close(outputs[1], torch.where(labels < 0, 0, picked))
    close(logits, wanted.to(dtype))


@pytest.mark.parametrize("rows_of_a_block", [3, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_of_a_linear_layer_is_that_of_its_blocks(dtype, rows_of_a_block, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "FEWEST", rows_of_a_block)
    monkeypatch.setitem(linear_cross_entropy.BLOCK, DEVICE, 0)
    hidden, weight = randn(7, 32, dtype=dtype), randn(50, 32, dtype=dtype)
    labels = torch.randint(-1, 50, (7,), device=DEVICE)
    operands = randn(7), randn(7), hidden, weight, None, labels, [True, True, False]
    monkeypatch.setattr(linear_cross_entropy, "_in_triton", lambda logits: None)
    wanted = linear_cross_entropy.with_gradients(*operands)
    monkeypatch.setattr(linear_cross_entropy, "_in_triton", lambda logits: differentiate)
    for got, of_torch in zip(linear_cross_entropy.with_gradients(*operands)[:4], wanted[:4], strict=True):
        close(got, of_torch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [
    Scheme(8, None), Scheme(4, 32), Scheme(4, 64, False), Scheme(3, 64, False), Scheme(2, 128), Scheme(5, 48, False),
    Scheme(6, None), Scheme(7, 24), Scheme(8, 16, False), Scheme(8, None, kind="float8"), Scheme(8, 48, kind="float8"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rows_of_x, n", [(1, 40), (5, 7), (20, 33)])
def test_linear_layers_with_quantized_weights(rows_of_x, n, scheme, dtype):
    k = 192 if scheme.group in (48, 24, 16) else 256
    bias = torch.nn.Parameter(randn(n, dtype=dtype), False) if n > 10 else None
    layer = QuantizedLinear(k, n, scheme, bias, dtype, DEVICE)
    layer.load(randn(n, k) / 10)
    low = weight_kinds.INT3 if scheme.bits == 3 else weight_kinds.INT2
    kind = {"int8": weight_kinds.INT8, "int4": weight_kinds.INT4, "float8": weight_kinds.FLOAT8,
            "low": low, "bits": weight_kinds.CODES}[layout(scheme, k)]  # fmt: skip
    x = randn(rows_of_x, k, dtype=dtype)
    y = linear_quantized_triton.linear(x, layer.q, layer.scales, layer.zeros, bias, kind, scheme.bits)
    wanted = torch.nn.functional.linear(
        x.double(), layer.dequantize().double(), None if bias is None else bias.double()
    )
    close(y, wanted.to(dtype))
