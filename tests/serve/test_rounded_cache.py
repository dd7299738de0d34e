"""Engines whose KV cache is of int8 or int4."""

import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import encoder_models
from tutti.serve import Engine, Request, Sampling

GREEDY = Sampling(max_tokens=8, temperature=0, ignore_end=True, logprobs=3)
WIDE = dict(hidden_size=128, intermediate_size=64)  # heads of 32
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])
BYTES, BOUND = {"int8": 36, "int4": 20}, {"int8": 0.05, "int4": 0.5}  # of a row; of errors of log-probabilities


def tokens_and_logprobs(engine, prompts):
    return [(x.tokens, [y.logprob for y in x.completions[0].logprobs]) for x in engine.generate(prompts, GREEDY)]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.starts
def test_the_same_logits_within_the_rounding_in_fewer_bytes(dtype, kind):
    model, prompts = tiny.model(**WIDE).to(dtype), tiny.prompts(5, 40, 19)
    exact = Engine(model, blocks=32, plan="single")
    engine = Engine(model, blocks=32, plan="single", cache_dtype=kind)
    assert exact.runner.cache_bytes * (BYTES[kind] / 32 / dtype.itemsize) == engine.runner.cache_bytes
    stored = [x for name, x in engine.runner.store.parts[0].items() if "cache" in name]
    assert sum(x.nbytes for x in stored) == engine.runner.cache_bytes
    request = Sampling(max_tokens=1, prompt_logprobs=0)
    logprobs, wanted = (torch.tensor([y.logprob for x in each.generate([Request(x, request) for x in prompts])
                                      for y in x.prompt_logprobs if y]) for each in (engine, exact))  # fmt: skip
    assert 0 < (logprobs - wanted).abs().mean() < BOUND[kind]


@pytest.mark.parametrize("plan, kind", [("tp2", "int8"), ("pp2", "int8"), ("tp2", "int4")])
@pytest.mark.starts
def test_on_two_devices(plan, kind):
    model, prompts = tiny.model(**WIDE), tiny.prompts(5, 40)
    whole = tokens_and_logprobs(Engine(model, blocks=32, plan="single", cache_dtype=kind), prompts)
    split = tokens_and_logprobs(Engine(model, blocks=32, plan=plan, cluster="cpu:2", cache_dtype=kind), prompts)
    for (tokens, logprobs), (wanted, expected) in zip(split, whole, strict=True):
        assert tokens == wanted and logprobs == pytest.approx(expected, abs=1e-3)


@KINDS
@pytest.mark.starts
def test_a_prefix_is_shared(kind):
    model, (prompt,) = tiny.model(**WIDE), tiny.prompts(40)
    engine = Engine(model, blocks=32, plan="single", cache_dtype=kind)
    first, second = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    assert second.cached >= 32 and second.tokens == first.tokens


@KINDS
def test_a_model_with_an_encoder(kind):
    model, sampling = encoder_models.model_of("T5"), Sampling(max_tokens=5, temperature=0)
    wanted = Engine(model, blocks=32, plan="single").generate([[5, 6, 7]], sampling)[0].tokens
    engine = Engine(model, blocks=32, plan="single", cache_dtype=kind)
    assert engine.generate([[5, 6, 7]], sampling)[0].tokens == wanted


@pytest.mark.starts
def test_what_is_preempted_goes_on_with_its_cache():
    model, prompts = tiny.model(**WIDE), tiny.prompts(30, 30, 30)
    wanted = tokens_and_logprobs(Engine(model, blocks=64, plan="single", cache_dtype="int4"), prompts)
    small = Engine(model, blocks=7, plan="single", cache_dtype="int4", host_memory=1 << 20, prefix_cache=False)
    assert tokens_and_logprobs(small, prompts) == wanted and small.runner.host, "blocks were moved to the host"


def test_blocks_of_a_gigabyte():
    model = tiny.model(**{**WIDE, "hidden_size": 512})  # heads of 128
    kinds = {kind: Engine(model, memory=1 << 22, plan="single", cache_dtype=kind, self_check=False).runner.blocks
             for kind in ("", "int8", "int4")}  # fmt: skip
    assert kinds["int8"] > 3.8 * kinds[""] and kinds["int4"] > 1.8 * kinds["int8"]


def test_what_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)).half()
    with pytest.raises(ValueError, match=r"of torch.float16 on cpu: attention reads it on CPUs only.*leave"):
        Engine(model, blocks=8, plan="single", cache_dtype="int8")
    with pytest.raises(ValueError, match="cache_dtype='int2'; expected 'int8', 'int4'"):
        Engine(tiny.model(), blocks=8, plan="single", cache_dtype="int2")  # pyright: ignore
    odd = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=10, n_head=2, vocab_size=50))
    with pytest.raises(ValueError, match="rows of 5 numbers; expected an even number: use int8"):
        Engine(odd, blocks=8, plan="single", cache_dtype="int4")
