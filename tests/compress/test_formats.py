"""The format compressed-tensors: what is saved is what transformers and Tutti load."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import compress_models as small
import tutti
from tutti.compress import Quantize, Recipe, Rotate, Scheme
from tutti.compress.compressor import bytes_of
from tutti.compress.folder import load
from tutti.compress.formats import compressed_tensors as written

EXACT = ["int4", "int8", "float8", "int3-g32", "int2-g16-zeros", "int4-g32-zeros-gptq", "int4-head", "int8-a8static",
         "int4-g32-head-e4", "rotate+int4", "int5-channel", "int4-s16"]  # fmt: skip


@pytest.mark.parametrize("recipe", EXACT)
def test_transformers_loads_it(recipe, tmp_path):
    compressed = tutti.compress(small.llama(), recipe, small.batches())
    compressed.save(tmp_path / "out")
    wanted = small.logits(compressed.model)
    loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"]
    torch.testing.assert_close(small.logits(loaded), wanted, rtol=1e-3, atol=1e-3)
    ours = load(tmp_path / "out")
    assert torch.equal(small.logits(ours), wanted)
    in_file = sum(x.nbytes for x in load_file(tmp_path / "out" / "model.safetensors").values())
    shapes = 16 * sum(".weight_shape" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    assert in_file - shapes == pytest.approx(
        bytes_of(compressed.model), rel=0.01
    ) and compressed.report.after == bytes_of(compressed.model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["int4-g32-s8-e4", "int8-a8static", "int8-a8static+distill-1"])
def test_numbers_of_small_dtypes_are_those_of_the_file(recipe, dtype, tmp_path):
    small.llama().save_pretrained(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=dtype)
    compressed = tutti.compress(model, recipe, small.batches())
    with nullcontext() if "static" in recipe else pytest.warns(UserWarning, match="scales in int8"):
        compressed.save(tmp_path / "out")
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(compressed.model))


def test_inputs_that_are_always_0_have_a_scale():
    model = copy.deepcopy(small.llama())
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    compressed = tutti.compress(model, "int8-a8static", small.batches())
    wanted = small.logits(model)
    assert (small.logits(compressed.model) - wanted).norm() < 0.1 * wanted.norm()
    assert all(x.error < 0.05 for x in compressed.report.layers)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("recipe", ["int4", "float8", "int8"])
def test_transformers_loads_experts(kind, recipe, tmp_path):
    """From the names of files that it knows for them: otherwise it would draw random numbers in their place."""
    compressed = tutti.compress(small.model(kind), recipe)
    compressed.save(tmp_path / "out")
    loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    torch.testing.assert_close(small.logits(loaded), small.logits(compressed.model), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        small.logits(load(tmp_path / "out")), small.logits(compressed.model), rtol=1e-4, atol=1e-4
    )


def test_experts_that_transformers_would_load_wrongly(tmp_path):
    compressed = tutti.compress(small.model("gpt-oss"), "int4")
    with pytest.raises(ValueError, match="no names for the experts of GptOssForCausalLM one by one"):
        compressed.save(tmp_path / "out")
    for recipe in ("int4-zeros", "w8a8", Quantize(overrides=(("*.0.mlp.experts.*", Scheme(8, None)),))):
        compressed = tutti.compress(small.model("qwen3-moe"), recipe)
        with pytest.raises(ValueError, match="one scheme for experts, without zeros and activations"):
            compressed.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    attention_only = tutti.compress(small.model("gpt-oss"), Quantize(ignore=("lm_head", "*.experts.*")))
    attention_only.save(tmp_path / "kept")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "kept", dtype="auto")
    torch.testing.assert_close(small.logits(loaded), small.logits(attention_only.model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("quantize", [(), (Quantize(Scheme(4, 32), ignore=("lm_head", "*.experts.*")),)])
def test_experts_that_are_rotated_only(kind, quantize, tmp_path):
    compressed = tutti.compress(small.model(kind), Recipe((Rotate(untie=True), *quantize)))
    compressed.save(tmp_path / "out")
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(compressed.model))
    loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    torch.testing.assert_close(small.logits(loaded), small.logits(compressed.model), rtol=1e-3, atol=1e-3)


def test_tied_embeddings(tmp_path):
    compressed = tutti.compress(small.model(tie_word_embeddings=True), "int4-g32-e4")
    compressed.save(tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight_packed" in names and not any(x.startswith("lm_head") for x in names)
    ours = load(tmp_path / "out")
    assert ours.lm_head.q is ours.model.embed_tokens.q and torch.equal(
        small.logits(ours), small.logits(compressed.model)
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    torch.testing.assert_close(small.logits(loaded), small.logits(compressed.model), rtol=1e-3, atol=1e-3)


def test_several_schemes(tmp_path):
    step = Quantize(overrides=(("down_proj", Scheme(8, None)), ("v_proj", None), ("*.0.*.o_proj", Scheme(4, 32))))
    compressed = tutti.compress(small.llama(), step)
    compressed.save(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    torch.testing.assert_close(small.logits(loaded), small.logits(compressed.model), rtol=1e-3, atol=1e-3)
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(compressed.model))


def test_schemes_of_equally_many_layers(tmp_path):
    eight = Scheme(8, None)
    step = Quantize(ignore=("lm_head", "mlp.*"), overrides=(("k_proj", eight), ("v_proj", eight)))
    compressed = tutti.compress(small.llama(), step)
    compressed.save(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    torch.testing.assert_close(small.logits(loaded), small.logits(compressed.model), rtol=1e-3, atol=1e-3)
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(compressed.model))


def test_what_transformers_cannot_load_is_said(tmp_path):
    compressed = tutti.compress(small.llama(), "int4-e8")
    with pytest.warns(UserWarning, match="transformers cannot load embeddings or zeros with several schemes"):
        compressed.save(tmp_path / "out")
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(compressed.model))
    with pytest.raises(Exception, match="weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")


def test_bfloat16(tmp_path):
    model = small.model().bfloat16()
    compressed = tutti.compress(model, "int4")
    compressed.save(tmp_path / "out")
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"].dtype
        == torch.bfloat16
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    loaded(torch.tensor([[1, 2]]))  # it widens weights in its first pass
    for path in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"):
        assert torch.equal(loaded.get_submodule(path).weight, compressed.model.get_submodule(path).dequantize())


def test_several_files(tmp_path):
    compressed = tutti.compress(small.llama(), "int4")
    compressed.save(tmp_path / "out", shard=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert torch.equal(small.logits(load(tmp_path / "out")), small.logits(compressed.model))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"]


def test_folders_are_replaced_whole(tmp_path):
    compressed = tutti.compress(small.llama(), "int4")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(ValueError, match="already exists and is not a model"):
        compressed.save(tmp_path / "notes")
    with pytest.raises(ValueError, match="expected one of compressed-tensors"):
        compressed.save(tmp_path / "out", format="zip")
    for _ in range(2):
        compressed.save(tmp_path / "out")
    assert {x.name for x in tmp_path.iterdir()} == {"notes", "out"}


CONFIG = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group",
                                                               "group_size": 32, "symmetric": True}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quant_method": "gptq"}, "quantized by 'gptq'; only compressed-tensors is read"),
        ({"config_groups": {"g": {"targets": ["Linear"]}}}, "damaged: KeyError 'weights'"),
        ({"config_groups": None}, "damaged"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float",
                                                                     "strategy": "tensor_group"}}}}, "not supported"),
    ],
)  # fmt: skip
def test_configs_that_are_not_supported(changed, message):
    assert written.schemes_of(CONFIG, {"a.b": "Linear"}) == {"a.b": Scheme(4, 32)}
    with pytest.raises(ValueError, match=message):
        written.schemes_of({**CONFIG, **changed}, {"a.b": "Linear"})


def test_tensors_that_are_wrong(tmp_path):
    compressed = tutti.compress(small.llama(), "int4")
    compressed.save(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    whole, name = load_file(path), "model.layers.0.mlp.up_proj.weight_packed"
    for x, message in [
        (whole[name][:5].clone(), r"up_proj: weight_packed is torch.int32 \(5, 8\); expected torch.int32 \(128, 8\)"),
        (whole[name].float(), "expected torch.int32"),
        (None, "has no tensor 'model.layers.0.mlp.up_proj.weight_packed'"),
    ]:
        written.write({**{k: v for k, v in whole.items() if k != name}, **({} if x is None else {name: x})}, path)
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "out")
