"""Engines with quantized weights, against the same model with dequantized ones."""

import copy

import pytest
import tiny
import torch
from torch import nn

import encoder_models
from tutti.nn.linear.linear_int4 import dequantize_int4, quantize_int4
from tutti.nn.linear.linear_int8 import dequantize_int8, quantize_int8
from tutti.nn.quantized.quantized_linear import quantized_layers
from tutti.serve import Engine, Request, Sampling

WIDE = dict(hidden_size=64, intermediate_size=128)
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_end=True, logprobs=3)
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])


def dequantized(model, kind):
    """A copy of a model whose linear layers have rounded weights, in floats."""
    rounded = copy.deepcopy(model)
    for path, layer in rounded.named_modules():
        if isinstance(layer, nn.Linear) and path != "lm_head":
            w = layer.weight.detach()
            new = dequantize_int8(*quantize_int8(w)) if kind == "int8" else dequantize_int4(*quantize_int4(w))
            layer.weight.data = new.to(w.dtype)
    return rounded


def tokens_and_logprobs(outputs):
    return [(x.tokens, [y.logprob for y in x.completions[0].logprobs]) for x in outputs]


def bytes_of(engine):
    store = engine.runner.store
    return sum(x.nbytes for part in store.parts for name, x in part.items() if name.startswith("param:"))


def assert_alike(engine, reference, prompts):
    for (tokens, logprobs), (wanted, expected) in zip(
        tokens_and_logprobs(engine.generate(prompts, GREEDY)),
        tokens_and_logprobs(reference.generate(prompts, GREEDY)),
        strict=True,
    ):
        assert tokens == wanted
        assert logprobs == pytest.approx(expected, abs=1e-4)


@KINDS
@pytest.mark.starts
def test_as_the_dequantized_model(kind):
    model, prompts = tiny.model(**WIDE), tiny.prompts(5, 19)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    engine = Engine(model, blocks=32, plan="single", quantize=kind)
    assert_alike(engine, Engine(dequantized(model, kind), blocks=32, plan="single"), prompts)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    other = tiny.model(seed=1, **WIDE)
    places = {name: x.data_ptr() for name, x in engine.runner.store.parts[0].items()}
    engine.update(other.state_dict())
    assert places == {name: x.data_ptr() for name, x in engine.runner.store.parts[0].items()}
    assert_alike(engine, Engine(dequantized(other, kind), blocks=32, plan="single"), prompts)


@KINDS
@pytest.mark.starts
def test_from_a_folder_in_fewer_bytes(kind, tmp_path):
    model, prompts = tiny.model(tie_word_embeddings=True, **WIDE), tiny.prompts(5)
    model.save_pretrained(tmp_path)
    engine = Engine(str(tmp_path), blocks=32, plan="single", quantize=kind)
    assert tokens_and_logprobs(engine.generate(prompts, GREEDY)) == tokens_and_logprobs(
        Engine(model, blocks=32, plan="single", quantize=kind).generate(prompts, GREEDY)
    )
    layers = [x for x in model.modules() if isinstance(x, nn.Linear) and x is not model.lm_head]
    weights = sum(x.weight.numel() for x in layers)
    rest = sum(x.numel() for x in model.parameters()) - weights
    scales = 4 * sum(x.out_features if kind == "int8" else x.weight.numel() // 64 for x in layers)
    assert bytes_of(engine) == 4 * rest + scales + (weights if kind == "int8" else weights // 2)


@pytest.mark.parametrize(("kind", "plan"), [("int8", "tp2"), ("int4", "tp2"), ("int8", "pp2")])
@pytest.mark.starts
def test_on_two_devices(kind, plan):
    model, prompts = tiny.model(**WIDE), tiny.prompts(5, 19)
    engine = Engine(model, blocks=32, plan=plan, cluster="cpu:2", quantize=kind)
    assert_alike(engine, Engine(model, blocks=32, plan="single", quantize=kind), prompts)


def test_a_model_with_an_encoder():
    model, sampling = encoder_models.model_of("T5"), Sampling(max_tokens=5, temperature=0)
    engine = Engine(model, blocks=32, plan="single", quantize="int8")
    assert len(engine.generate([[5, 6, 7]], sampling)[0].tokens) and bytes_of(engine) < 0.5 * model_bytes(model)


def test_layers_that_are_not_used(tmp_path):
    """LLaVA does not use the last layer of its vision tower."""
    model = encoder_models.llava()
    model.save_pretrained(tmp_path)
    request = Request([5, 9, 9, 9, 9], GREEDY, inputs={"pixel_values": torch.ones(1, 3, 16, 16)})
    engines = [Engine(x, blocks=32, plan="single", quantize="int8") for x in (model, tmp_path)]
    tokens = [x.generate([request])[0].tokens for x in engines]
    engines[1].update(model.state_dict())
    assert tokens[0] == tokens[1] == engines[1].generate([request])[0].tokens


def model_bytes(model: nn.Module) -> int:
    return sum(x.nbytes for x in model.parameters())


def test_what_cannot_be_quantized():
    with pytest.raises(ValueError, match="expected 'int8' or 'int4'"):
        Engine(tiny.model(), blocks=32, plan="single", quantize="int2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="q_proj has 32 inputs; int4 needs a multiple of 64: use int8"):
        Engine(tiny.model(), blocks=32, plan="single", quantize="int4")
    assert not quantized_layers(tiny.model())
