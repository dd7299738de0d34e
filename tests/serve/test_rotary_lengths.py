"""Rotary factors that depend on the length of a sequence: tokens as `generate` makes for each sequence alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
import transformers as t

from tutti.serve import Disaggregated, DraftModel, Engine, Request, Sampling
from tutti.serve.cache.rotary import scaling_of

LIMIT, LENGTHS, COUNT = 32, (3, 20, 27, 31, 32, 33, 50), 8
SIZES = dict(vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, initializer_range=0.2, bos_token_id=1, eos_token_id=None,
             pad_token_id=0)  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
        "original_max_position_embeddings": LIMIT}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "Phi 3, longrope": lambda: t.Phi3Config(
        **SIZES, max_position_embeddings=256, original_max_position_embeddings=LIMIT, rope_scaling=dict(LONG)),
    "Llama, longrope": lambda: t.LlamaConfig(**SIZES, max_position_embeddings=256, rope_scaling=dict(LONG)),
    "Llama, dynamic": lambda: t.LlamaConfig(
        **SIZES, max_position_embeddings=LIMIT, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "PhiMoE, longrope": lambda: t.PhimoeConfig(
        **SIZES, max_position_embeddings=256, original_max_position_embeddings=LIMIT, num_local_experts=2,
        rope_scaling={**LONG, "short_mscale": 1.1, "long_mscale": 1.3}),
}  # fmt: skip
GREEDY = Sampling(max_tokens=COUNT, temperature=0)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request) -> tuple[Any, list[list[int]], list[list[int]]]:
    """A model, prompts, and what a fresh copy of the model makes of each."""
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    prompts = tiny.prompts(*LENGTHS)
    prompts = [[1 + x % 199 for x in prompt] for prompt in prompts]
    return model, prompts, [tiny.greedy(copy.deepcopy(model), x, COUNT, pad_token_id=0) for x in prompts]


def engine(model: Any, plan: str = "single", devices: int = 1, **options: Any) -> Engine:
    sizes = {"blocks": 80, "block": 4, "budget": 16, "most": 8, "longest": 100}
    return Engine(model, plan=plan, cluster=f"cpu:{devices}", **{**sizes, **options})


def test_below_above_and_across_the_limit(case):
    """In one batch in chunks, again from the prefix cache, and alone."""
    model, prompts, wanted = case
    served = engine(model)
    assert [x.tokens for x in served.generate(prompts, GREEDY)] == wanted
    again = served.generate(prompts[::-1], GREEDY)
    assert [x.tokens for x in again] == wanted[::-1] and sum(x.cached for x in again) >= 60
    assert [served.generate([x], GREEDY)[0].tokens for x in prompts] == wanted
    assert served.pool.used == 0


def test_a_prefix_of_another_length_is_not_shared_across_the_limit(case):
    model, prompts, _ = case
    served, long = engine(model), prompts[-1]
    for n in (24, 40, 49, 24):
        want = tiny.greedy(copy.deepcopy(model), long[:n], COUNT, pad_token_id=0)
        assert served.generate([long[:n]], GREEDY)[0].tokens == want


def test_a_salt_that_looks_like_another_length_shares_nothing(case):
    model, prompts, _ = case
    served, long = engine(model), prompts[-1][:49]
    served.generate([Request(long[:24], GREEDY, salt="a" + served.runner.scaling.factors(49, 49).decode())])
    (output,) = served.generate([Request(long, GREEDY, salt="a")])
    assert output.tokens == tiny.greedy(copy.deepcopy(model), long, COUNT, pad_token_id=0) and not output.cached


@pytest.mark.parametrize("options", [
    {"blocks": 20}, {"blocks": 20, "host_memory": 1 << 20}, {"speculate": 3}, {"plan": "tp2", "devices": 2},
], ids=["computed again", "swapped", "guesses", "tp2"])  # fmt: skip
def test_preemption_guesses_and_plans(case, options):
    model, prompts, wanted = case
    served = engine(model, **options)
    assert [x.tokens for x in served.generate(prompts, GREEDY)] == wanted
    assert served.scheduler.preemptions or "blocks" not in options


def test_several_continuations_and_beams_across_the_limit(case):
    model, prompts, _ = case
    served, prompt = engine(model), prompts[3]
    one = Sampling(max_tokens=COUNT, seed=3, n=3)
    first, second = (served.generate(x, one)[0] for x in ([prompt], [prompt, prompts[0]]))
    assert [x.tokens for x in first.completions] == [x.tokens for x in second.completions]
    assert len(served.generate([prompt], Sampling(max_tokens=COUNT, beams=3, n=3))[0].completions) == 3


def test_handed_on_at_the_limit(case):
    model, prompts, wanted = case
    served = Disaggregated(engine(model), engine(model))
    assert [x.tokens for x in served.generate(prompts, GREEDY)] == wanted


def test_embeddings_have_the_factors_of_their_length(case):
    """They are computed with padding, up to 24, 32, 48 and 64 tokens."""
    model, prompts, _ = case
    served = engine(model)
    for prompt in (prompts[1], prompts[5]):
        with torch.no_grad():
            hidden = copy.deepcopy(model).base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        mean = torch.nn.functional.normalize(hidden.mean(0), dim=-1)
        assert torch.allclose(served.embed([prompt])[0], mean, atol=1e-5)


def test_what_generate_does_with_its_cache_is_found_out(case):
    model, *_ = case
    scaling = scaling_of(model)
    assert scaling is not None and scaling.limit == LIMIT
    assert scaling.recomputed == (model.config.model_type in ("phi3", "phimoe"))
    assert scaling_of(tiny.model()) is None


def test_a_draft_model_with_other_factors(case):
    model, prompts, _ = case
    served = Engine(model, plan="single", blocks=80, longest=100, speculate=DraftModel(model, count=2, plan="single"))
    outputs = served.generate([Request(prompts[2], GREEDY)])
    assert outputs[0].tokens == tiny.greedy(copy.deepcopy(model), prompts[2], COUNT, pad_token_id=0)
    assert served.accepted >= 1


def test_factors_that_do_not_follow_a_length_are_refused(monkeypatch):
    """A module that looks at the largest position in a way of its own."""
    model = t.AutoModelForCausalLM.from_config(CONFIGS["Llama, dynamic"]())
    kind = type(model.model.rotary_emb)
    right = kind.forward.__wrapped__

    def forward(self, x, position_ids):
        return right(self, x, position_ids / position_ids.max().clamp(min=1))

    from transformers.modeling_rope_utils import dynamic_rope_update

    monkeypatch.setattr(kind, "forward", dynamic_rope_update(forward))
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:0]
    with pytest.raises(ValueError, match=r"does not follow the length of each sequence.*model\.generate"):
        scaling_of(model)


def test_factors_that_change_one_token_late_are_refused(monkeypatch):
    """A module that begins to scale at two tokens beyond the limit, right at the limit and far beyond it."""
    model = t.AutoModelForCausalLM.from_config(CONFIGS["Llama, dynamic"]())
    kind = type(model.model.rotary_emb)
    scaled = kind.forward

    def forward(self, x, position_ids):
        late = int(position_ids.max()) == LIMIT  # the last of LIMIT + 1 tokens
        return (scaled.__wrapped__ if late else scaled)(self, x, position_ids)

    forward.__wrapped__ = scaled.__wrapped__
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(ValueError, match=r"does not follow the length of each sequence"):
        scaling_of(model)
