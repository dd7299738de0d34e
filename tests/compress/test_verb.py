"""Recipes of several steps, as texts, and what is refused before anything is computed."""

from __future__ import annotations

import pytest
import torch
import transformers

from compress_models import data, small
from tutti.compress import Distill, Mixed, Prune, Quantize, Recipe, Scheme, Shrink, compress, parse
from tutti.compress.folder import load
from tutti.nn.quantized.quantized_linear import quantized_layers


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("shrink-heads0.5-channels0.75-layers2", (Shrink(0.5, 0.75, layers=2),)),
        ("prune-2:4-wanda+int4-gptq", (Prune(pattern="2:4", method="wanda"), Quantize(Scheme(4), "gptq"))),
        ("prune-0.7", (Prune(0.7),)),
        (
            "mixed-2.7-s16",
            (Mixed(2.7, tuple(Scheme(b, g, scales="float16") for b, g in ((2, 32), (3, 64), (4, 64), (8, None)))),),
        ),
        ("mixed-3.2-hqq-e8", (Mixed(3.2, method="hqq", embeddings=Scheme(8, None)),)),
        ("int2-g32+distill-500-lr0.001-hidden1", (Quantize(Scheme(2, 32)), Distill(500, 0.001, hidden=1.0))),
    ],
)
def test_texts(text, steps):
    assert parse(text) == Recipe(steps)


def test_tables(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(
        '[[step]]\nkind = "shrink"\nchannels = 0.5\n\n[[step]]\nkind = "mixed"\nbits = 3.5\n'
        'schemes = ["int2-g16", "int4-g16"]\n\n[[step]]\nkind = "distill"\nsteps = 10\n'
    )
    assert parse(str(file)) == Recipe((Shrink(channels=0.5), Mixed(3.5, (Scheme(2, 16), Scheme(4, 16))), Distill(10)))


def test_a_shrunk_and_quantized_model_is_saved_and_generates(tmp_path):
    model, batches = small(), data()
    compressed = compress(model, "shrink-heads0.5-channels0.5-layers1+int4-g16-gptq+distill-2", batches)
    assert "channels: 32 of 64 left" in str(compressed.report) and len(quantized_layers(compressed.model)) == 14
    compressed.save(tmp_path / "small")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "small")
    assert (config.num_hidden_layers, config.intermediate_size, config.num_key_value_heads) == (2, 32, 1)
    ids = batches[0]["input_ids"][:1]
    assert compressed.model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 19)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("int4-g16+shrink-heads0.5", "a quantized model is only distilled: put shrink before"),
        ("prune-0.5+rotate", "rotate would fill zeros again"),
        ("prune-0.5+shrink-heads0.5", "shrink would fill zeros again"),
        ("int4-g16+mixed-3", "a recipe quantizes once"),
        ("shrink-layers9+int4-g16", "the model has 3 layers"),
        ("prune-1:5+int4-g16", "does not divide"),
        ("shrink", "removes nothing"),
        ("prune-0.5-wanda2", "did you mean 'wanda'"),
        ("distil-10", "is not a step"),
        ("distill-lrx", "is not known"),
        ("int4-g48", "which groups of 48 do not divide"),
    ],
)
def test_what_is_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        compress(small(), recipe, data())


def test_a_folder_is_shrunk_into_another(tmp_path):
    model = small().bfloat16()
    model.save_pretrained(tmp_path / "model")
    compressed = compress(tmp_path / "model", "shrink-heads0.5+int4-g16+distill-2", data(), out=tmp_path / "out")
    assert compressed.model is None and compressed.folder == tmp_path / "out"
    again = load(tmp_path / "out")
    assert again.config.num_key_value_heads == 1 and len(quantized_layers(again)) == 21
    assert again(**data()[0]).logits.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="is the model itself"):
        compress(tmp_path / "model", "shrink-heads0.5", data(), out=tmp_path / "model")


@pytest.mark.parametrize("recipe", ["int4-g16", "rotate+int4-g16-awq", "prune-0.5+int4-g16", "distill-1"])
def test_the_model_that_was_given_is_not_changed(recipe):
    model = small(layers=1).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    compressed = compress(model, recipe, data()).model.bfloat16()
    for x in compressed.parameters():
        x.data.zero_()
    assert model.training and all(x.requires_grad for x in model.parameters())
    for name, x in model.state_dict().items():
        assert x.dtype == torch.float32 and torch.equal(x, before[name])


def test_training_data_is_used_for_distillation():
    model, batches = small(layers=1), data()
    other = [{"input_ids": torch.full((4, 16), 3)}]
    losses = [
        str(compress(model, "int2-g16+distill-3", batches, training=training).report).split("loss ")[1].split()[0]
        for training in (None, other)
    ]
    assert losses[0] != losses[1]
    with pytest.raises(ValueError, match="training= is for distillation"):
        compress(model, "int4-g16", batches, training=other)


def test_the_model_that_was_compressed_is_not_overwritten(tmp_path):
    small(layers=1).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is the model that was compressed"):
        compress(model, "int4-g16").save(tmp_path)
    assert not quantized_layers(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
