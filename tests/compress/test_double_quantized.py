"""Scales in int8: what rounding costs, files, and models that use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compress_models import batches, logits, model
from tutti.compress import Mixed, Quantize, Scheme, compress, load, parse
from tutti.compress.compressor import bytes_of
from tutti.nn.quantized.scheme import of_scale_codes, scale_codes


def drawn(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(3, 7), (16, 16), (100, 9)])
def test_scales_are_off_by_half_a_unit_at_most(shape):
    scales = drawn(*shape)
    scales[0, :2] = torch.tensor([0.0, 1e-7])
    codes, units = scale_codes(scales)
    decoded = of_scale_codes(codes, units)
    most = torch.nn.functional.pad(scales.flatten(), (0, -scales.numel() % 256)).view(-1, 256).abs().amax(1)
    assert codes.dtype == torch.int8 and units.shape == most.shape == (-(-scales.numel() // 256),)
    bound = (most / 254 * 1.001 + 1e-9).repeat_interleave(256)[: scales.numel()].view(shape)
    bound = torch.where(scales.abs() < bound, 2 * bound, bound)  # what would become 0 does not
    assert torch.all((decoded - scales).abs() <= bound) and decoded[0, 0] == 0 and decoded[0, 1] > 0
    assert torch.equal(of_scale_codes(*scale_codes(decoded)), decoded), "they are rounded once"
    assert torch.equal(Scheme(scales="int8").stored(scales, torch.bfloat16), decoded)


def test_weights_lose_little():
    weight = drawn(64, 256)
    for scheme in (Scheme(2, 32), Scheme(4, 64, symmetric=False), Scheme(2, 32, kind="ternary")):
        lost = [float((weight - x.rounded(weight)).square().sum()) for x in (scheme, replace(scheme, scales="int8"))]
        assert lost[1] == pytest.approx(lost[0], rel=2e-3) and lost[0] != lost[1]


@pytest.mark.parametrize("recipe", ["int2-g32-s8-gptq", "int4-s8-zeros-awq-e4", "ternary-s8", "int3-s8-hqq", "int8-s8"])
def test_files(recipe, tmp_path):
    compressed = compress(model(tie_word_embeddings="e4" in recipe), recipe, batches())
    with pytest.warns(UserWarning, match=r"transformers cannot load .*scales in int8"):
        compressed.save(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.int8
    stored_bytes = sum(x.nbytes for name, x in tensors.items() if not name.endswith("weight_shape"))
    assert compressed.report.after == bytes_of(compressed.model) == pytest.approx(stored_bytes, rel=0.01)
    assert torch.equal(logits(load(tmp_path / "out")), logits(compressed.model))
    with pytest.raises(ValueError, match="no `quant_method`"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.filterwarnings("ignore:transformers cannot load")
def test_a_folder_is_compressed_block_by_block(tmp_path):
    original = model()
    original.save_pretrained(tmp_path / "model")
    compressed = compress(tmp_path / "model", "ternary-g32-s8-gptq", batches(), out=tmp_path / "out")
    whole = compress(original, "ternary-g32-s8-gptq", batches())
    assert torch.equal(logits(load(tmp_path / "out")), logits(whole.model))
    assert [x.after for x in compressed.report.layers] == [x.after for x in whole.report.layers]


def test_bytes():
    assert Scheme(2, 32, scales="int8").bytes((64, 256)) == 64 * 64 + 64 * 8 + 4 * 2
    assert Scheme(2, 32, kind="ternary", scales="int8").bytes((64, 256)) == 64 * 52 + 64 * 8 + 4 * 2


def test_a_model_learns_with_them():
    compressed = compress(model(num_hidden_layers=1), "int2-g32-s8+distill-2", batches()).model
    scales = compressed.model.layers[0].mlp.up_proj.parts().scales
    assert torch.equal(Scheme(scales="int8").stored(scales, torch.float32), scales)


def test_names():
    assert parse("int2-g32-s8-e4").steps == (
        Quantize(Scheme(2, 32, scales="int8"), embeddings=Scheme(4, 32, scales="int8")),
    )
    mixed = parse("mixed-2.5-s8").steps[0]
    assert isinstance(mixed, Mixed) and {x.scales for x in mixed.schemes} == {"int8"}
    with pytest.raises(ValueError, match="gives scales twice"):
        parse("int4-s8-s16")
    with pytest.raises(ValueError, match="expected one of float16, bfloat16, int8"):
        Scheme(scales="float8")  # pyright: ignore[reportArgumentType]
