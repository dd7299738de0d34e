"""Engines whose KV cache is of int8."""

import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import encoder_models
from tutti.serve import Engine, Sampling

GREEDY = Sampling(max_tokens=8, temperature=0, ignore_end=True, logprobs=3)
WIDE = dict(hidden_size=128, intermediate_size=64)  # heads of 32


def told(engine, prompts):
    return [(x.tokens, [y.logprob for y in x.completions[0].logprobs]) for x in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.starts
def test_the_same_logits_within_the_rounding_in_fewer_bytes(dtype):
    model, prompts = tiny.model(**WIDE).to(dtype), tiny.prompts(5, 40, 19)
    exact = Engine(model, blocks=32, plan="single")
    engine = Engine(model, blocks=32, plan="single", cache_dtype="int8")
    assert exact.runner.cache_bytes * (36 / 32 / dtype.itemsize) == engine.runner.cache_bytes
    stored = [x for name, x in engine.runner.store.parts[0].items() if "cache" in name]
    assert sum(x.nbytes for x in stored) == engine.runner.cache_bytes
    for (tokens, found), (wanted, expected) in zip(told(engine, prompts), told(exact, prompts), strict=True):
        assert tokens[0] == wanted[0]
        assert found[0] == pytest.approx(expected[0], abs=0.1)
        assert found[0] != expected[0]


@pytest.mark.parametrize("plan", ["tp2", "pp2"])
@pytest.mark.starts
def test_on_two_devices(plan):
    model, prompts = tiny.model(**WIDE), tiny.prompts(5, 40)
    whole = told(Engine(model, blocks=32, plan="single", cache_dtype="int8"), prompts)
    split = told(Engine(model, blocks=32, plan=plan, cluster="cpu:2", cache_dtype="int8"), prompts)
    for (tokens, found), (wanted, expected) in zip(split, whole, strict=True):
        assert tokens == wanted and found == pytest.approx(expected, abs=1e-3)


@pytest.mark.starts
def test_a_prefix_is_shared():
    model, (prompt,) = tiny.model(**WIDE), tiny.prompts(40)
    engine = Engine(model, blocks=32, plan="single", cache_dtype="int8")
    first, second = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    assert second.cached >= 32 and second.tokens == first.tokens


def test_a_model_with_an_encoder():
    model, sampling = encoder_models.model_of("T5"), Sampling(max_tokens=5, temperature=0)
    wanted = Engine(model, blocks=32, plan="single").generate([[5, 6, 7]], sampling)[0].tokens
    engine = Engine(model, blocks=32, plan="single", cache_dtype="int8")
    assert engine.generate([[5, 6, 7]], sampling)[0].tokens == wanted


def test_what_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)).half()
    with pytest.raises(ValueError, match=r"of torch.float16 on cpu: attention reads int8 on CPUs only.*leave"):
        Engine(model, blocks=8, plan="single", cache_dtype="int8")
    with pytest.raises(ValueError, match="cache_dtype='int4'; expected 'int8'"):
        Engine(tiny.model(), blocks=8, plan="single", cache_dtype="int4")  # pyright: ignore
