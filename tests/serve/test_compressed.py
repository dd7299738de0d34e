"""Engines of folders that `tutti.compress` wrote."""

import pytest
import tiny
import torch

import tutti
from tutti.serve import Engine, Sampling

WIDE = dict(hidden_size=64, intermediate_size=128)
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_end=True, logprobs=3)


def batches():
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 256, (2, 32), generator=draw)} for _ in range(2)]


def saved(recipe, folder, **options):
    made = tutti.compress(tiny.model(**WIDE, **options), recipe, batches())
    made.save(folder)
    return made.model


@pytest.mark.parametrize(
    "recipe", ["int8", "int4-g32-zeros-gptq", "w8a8-smooth", "int3", "int2-g32-zeros", "int4-g128-head", "int3-g16",
               "float8", "int8-a8static", "int6-g32-zeros"]
)  # fmt: skip
@pytest.mark.starts
def test_it_is_served_as_it_is(recipe, tmp_path):
    wide = {**WIDE, "hidden_size": 128} if "g128" in recipe else WIDE
    made = tutti.compress(tiny.model(**wide), recipe, batches())
    made.save(tmp_path / "out")
    prompts = tiny.prompts(5, 19)
    engine = Engine(tmp_path / "out", blocks=32, plan="single")
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == [tiny.greedy(made.model, x, 8) for x in prompts]
    assert engine.bytes == sum(x.nbytes for x in made.model.parameters())


@pytest.mark.filterwarnings("ignore:transformers cannot load embeddings")
@pytest.mark.parametrize("recipe", ["int8", "int4-g32-zeros", "int4-e8", "int3", "int5-g16", "float8"])
@pytest.mark.starts
def test_on_two_devices(recipe, tmp_path):
    made = saved(recipe, tmp_path / "out", tie_word_embeddings="e8" in recipe)
    prompts = tiny.prompts(5, 19)
    engine = Engine(tmp_path / "out", blocks=32, plan="tp2", cluster="cpu:2")
    wanted = [tiny.greedy(made, x, 8) for x in prompts]
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted
    held = [x.nbytes for part in engine.runner.store.parts for name, x in part.items() if name.endswith("up_proj.q")]
    assert len(held) == 4 and len({*held}) == 1 and sum(held[::2]) == made.model.layers[0].mlp.up_proj.q.nbytes
    engine = Engine(made, blocks=32, plan="single")
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted, "and the object, too"


@pytest.mark.parametrize("options", [dict(quantize="int4"), dict(adapters={"a": "folder"})])
def test_it_is_not_quantized_twice(options, tmp_path):
    saved("int8", tmp_path / "out")
    with pytest.raises(ValueError, match="is quantized already"):
        Engine(tmp_path / "out", blocks=32, plan="single", **options)


def test_experts_are_refused(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=257, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           num_local_experts=4, **WIDE)  # fmt: skip
    tutti.compress(MixtralForCausalLM(config), "int4").save(tmp_path / "out")
    with pytest.raises(ValueError, match="quantized experts are not served: load the model with transformers"):
        Engine(tmp_path / "out", blocks=32, plan="single")
