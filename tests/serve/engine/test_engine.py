"""The engine gives the tokens of `transformers`, whatever else it computes."""

from __future__ import annotations

import math
import time

import pytest
import tiny
import torch
from transformers import BertConfig, BertForMaskedLM, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from tutti.serve import Engine, Request, Sampling
from tutti.serve.apart.replicas import Replicas, route
from tutti.serve.engine.sampling import drawn

GREEDY = Sampling(max_tokens=12, temperature=0, ignore_end=True)
OPTIONS = {
    "usual": {},
    "chunks of prompts": {"budget": 16, "most": 4},
    "few blocks": {"blocks": 9, "longest": 100},
    "few blocks, swapped": {"blocks": 9, "longest": 100, "host_memory": 1 << 20},
    "guesses": {"speculate": 3},
    "no prefix cache": {"prefix_cache": False},
    "small blocks": {"block": 4, "blocks": 100},
}


def engine(model=None, **options) -> Engine:
    return Engine(model or tiny.model(), tokenizer=tiny.tokenizer(),
                  **{"plan": "single", "blocks": 64, "budget": 64, "most": 8, **options})  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Engine:
    return engine()


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_tokens_are_those_of_transformers(name):
    model, prompts = tiny.model(), tiny.prompts(5, 40, 70, 3)
    expected = [tiny.greedy(model, x, 12, eos_token_id=None) for x in prompts]
    llm = engine(model, **OPTIONS[name])
    for again in range(2):  # from the prefix cache the second time
        outputs = llm.generate(prompts, GREEDY)
        assert [x.tokens for x in outputs] == expected
        if name in ("usual", "no prefix cache"):
            assert any(x.cached for x in outputs) == bool(again and name == "usual")
        assert llm.pool.used == 0
    if "few" in name:
        assert llm.scheduler.preemptions
    if name == "guesses":
        assert llm.accepted


def test_the_model_is_as_before_and_can_be_trained():
    model = tiny.model()
    engine(model).generate(tiny.prompts(5), GREEDY)
    assert model.config._attn_implementation == "sdpa"
    ids = torch.tensor(tiny.prompts(9))
    model(input_ids=ids, labels=ids).loss.backward()


def test_an_end_token_ends(shared):
    prompt = tiny.prompts(5)[0]
    expected = tiny.greedy(tiny.model(), prompt, 12, eos_token_id=None)
    sampling = Sampling(max_tokens=12, temperature=0, stop_tokens=(expected[4],))
    (output,) = shared.generate([prompt], sampling)
    assert output.tokens == expected[: expected.index(expected[4]) + 1] and output.completions[0].finish == "stop"
    late = Sampling(max_tokens=12, temperature=0, stop_tokens=(expected[4],), min_tokens=8)
    assert len(shared.generate([prompt], late)[0].tokens) >= 8


def test_length_ends(shared):
    (output,) = shared.generate([tiny.prompts(250)[0]], Sampling(temperature=0, ignore_end=True))
    assert len(output.tokens) == 6 and output.completions[0].finish == "length"  # of 256 positions


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_are_those_of_transformers(shared, beams):
    model = tiny.model()
    prompts = tiny.prompts(5, 20)
    outputs = shared.generate(prompts, Sampling(max_tokens=10, beams=beams, n=2))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, num_beams=beams, num_return_sequences=2,
                                  max_new_tokens=10, output_scores=True, return_dict_in_generate=True,
                                  pad_token_id=256)  # fmt: skip
        for completion, tokens, score in zip(output.completions, expected.sequences, expected.sequences_scores,
                                             strict=True):  # fmt: skip
            assert completion.tokens == tokens[len(prompt) : len(prompt) + len(completion.tokens)].tolist()
            assert completion.score == pytest.approx(float(score), rel=1e-4)
    assert shared.pool.used == 0


def test_a_seed_decides_whatever_the_batch(shared):
    prompts = tiny.prompts(5, 30, 8)
    sampling = Sampling(max_tokens=10, seed=3, top_p=0.9, n=2, ignore_end=True)
    together = shared.generate(prompts, sampling)
    alone = [engine(blocks=16, budget=16, most=2, speculate=3).generate([x], sampling)[0] for x in prompts]
    for a, b in zip(together, alone, strict=True):
        assert [x.tokens for x in a.completions] == [x.tokens for x in b.completions]
        assert a.completions[0].tokens != a.completions[1].tokens


def test_frequencies_are_the_probabilities(shared):
    """Pearson's test over 600 draws of a first token, against the model's own distribution."""
    model, prompt = tiny.model(), tiny.prompts(6)[0]
    sampling = {"temperature": 0.7, "top_k": 8, "max_tokens": 1}
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1] / 0.7
    values, tokens = logits.topk(8)
    p = dict(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))
    counts = dict.fromkeys(p, 0)
    for seed in range(75):
        for completion in shared.generate([prompt], Sampling(n=8, seed=seed, **sampling))[0].completions:
            counts[completion.tokens[0]] += 1
    chi2 = sum((counts[t] - 600 * q) ** 2 / (600 * q) for t, q in p.items())
    assert chi2 < 24.3  # 0.1 % of draws exceed it, with 7 degrees of freedom


def test_log_probabilities(shared):
    model, prompt = tiny.model(), tiny.prompts(6)[0]
    (output,) = shared.generate([prompt], Sampling(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1))
    with torch.no_grad():
        expected = model(torch.tensor([prompt + output.tokens])).logits[0].log_softmax(-1)
    logprobs = output.completions[0].logprobs
    assert [x.token for x in logprobs] == output.tokens
    for i, x in enumerate(logprobs):
        row = expected[len(prompt) - 1 + i]
        assert x.logprob == pytest.approx(float(row[x.token]), abs=1e-4)
        assert [t for t, _ in x.top] == row.topk(2).indices.tolist()
    assert [x.token for x in output.prompt_logprobs] == prompt[1:]
    for i, x in enumerate(output.prompt_logprobs):
        assert x.logprob == pytest.approx(float(expected[i, prompt[i + 1]]), abs=1e-4)


def test_logits_of_the_cache_are_those_of_the_whole_text():
    """Random lengths, in chunks, together: each position has the logits of a forward pass over all tokens before."""
    model, llm = tiny.model(), engine(budget=24, most=4)
    prompts = tiny.prompts(1, 2, 17, 33, 50, 97, seed=4)
    outputs = llm.generate(prompts, Sampling(max_tokens=9, seed=0, logprobs=5, prompt_logprobs=5, ignore_end=True))
    for output in outputs:
        with torch.no_grad():
            whole = model(torch.tensor([output.prompt + output.tokens])).logits[0].log_softmax(-1)
        logprobs = output.prompt_logprobs + output.completions[0].logprobs
        assert len(logprobs) == len(output.prompt) + 8
        for row, x in zip(whole, logprobs, strict=False):
            expected = row.topk(5)
            assert [p for _, p in x.top] == pytest.approx(expected.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_batch_does_not_change_a_bit(dtype):
    """A request has the same bits alone and with others, in chunks of any size."""
    model, prompts = tiny.model(num_key_value_heads=4).to(dtype), tiny.prompts(5, 40, 23, 61)
    sampling = Sampling(max_tokens=8, temperature=0, logprobs=4, prompt_logprobs=4, ignore_end=True)

    def logprobs_of(outputs) -> list:
        return [[x.prompt_logprobs, x.completions[0].logprobs] for x in outputs]

    together = logprobs_of(engine(model, budget=32).generate(prompts, sampling))
    alone = [
        logprobs_of(engine(model, budget=16, most=1, prefix_cache=False).generate([x], sampling))[0] for x in prompts
    ]
    assert together == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scored_tokens_have_the_bits_of_generated_ones(dtype):
    """The log-probabilities of an output do not change when it is given as a prompt, computed at once."""
    llm, prompts = engine(tiny.model().to(dtype), budget=128), tiny.prompts(5, 40)
    outputs = llm.generate(prompts, Sampling(max_tokens=20, seed=1, logprobs=0, ignore_end=True))
    scored = llm.generate([x.prompt + x.tokens for x in outputs], Sampling(max_tokens=1, prompt_logprobs=0))
    for output, score in zip(outputs, scored, strict=True):
        assert score.prompt_logprobs[len(output.prompt) - 1 :] == output.completions[0].logprobs


def test_prompt_log_probabilities_survive_a_preemption():
    prompts = tiny.prompts(40, 40)
    sampling = Sampling(max_tokens=30, temperature=0, prompt_logprobs=0, ignore_end=True)
    llm = engine(blocks=8, longest=100, budget=16, most=4)
    outputs = llm.generate(prompts, sampling)
    assert llm.scheduler.preemptions
    assert [[x.token for x in o.prompt_logprobs] for o in outputs] == [x[1:] for x in prompts]


def test_penalties_and_bias(shared):
    model, prompt = tiny.model(), tiny.prompts(6)[0]
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    expected = tiny.greedy(model, prompt, 10, logits_processor=penalty, eos_token_id=None)
    sampling = Sampling(max_tokens=10, temperature=0, repetition_penalty=1.7, ignore_end=True)
    assert shared.generate([prompt], sampling)[0].tokens == expected
    never = Sampling(max_tokens=20, temperature=0, presence_penalty=2, frequency_penalty=2, ignore_end=True,
                     allowed=(1, 2, 3), logit_bias={3: -1000.0})  # fmt: skip
    assert set(shared.generate([prompt], never)[0].tokens) == {1, 2}


def test_best_of_has_the_best_mean_log_probability(shared):
    prompt = tiny.prompts(6)[0]
    every = shared.generate([prompt], Sampling(max_tokens=5, n=6, seed=1, logprobs=0, ignore_end=True))[0]
    best = shared.generate([prompt], Sampling(max_tokens=5, n=1, best_of=6, seed=1, ignore_end=True))[0]
    mean = [sum(x.logprob for x in c.logprobs) / 5 for c in every.completions]
    assert best.tokens == every.completions[mean.index(max(mean))].tokens and len(best.completions) == 1


@pytest.mark.parametrize("kind, what, fits", [
    ("regex", "[ab]{3}-[0-9]+x", r"[ab]{3}-[0-9]+x"),
    ("schema", {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"],
                "additionalProperties": False}, r'\{"a": ?(1|22)\}'),
    ("grammar", 'start: "yes" | "no" "!"+', r"yes|no!+"),
])  # fmt: skip
def test_constraints(shared, kind, what, fits):
    import re

    outputs = shared.generate([Request("a", Sampling(max_tokens=60, seed=i, **{kind: what})) for i in range(4)])
    for output in outputs:
        if output.completions[0].finish == "stop":
            assert re.fullmatch(fits, output.text), output.text
    assert any(x.completions[0].finish == "stop" for x in outputs)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 3}, {"temperature": 0}], ids=str)
def test_a_request_without_a_possible_token_ends_alone(shared, options):
    never = Sampling(regex="()", min_tokens=3, max_tokens=5, **options)
    good, bad = shared.generate([Request("a", GREEDY), Request("a", never)])
    assert "no token is allowed" in bad.error and not good.error and len(good.tokens) == 12
    assert shared.pool.used == 0


def test_stop_texts_and_text(shared):
    (output,) = shared.generate(["hello"], Sampling(max_tokens=40, temperature=0, ignore_end=True))
    text = tiny.tokenizer().decode(output.tokens, skip_special_tokens=True)
    assert output.text == text
    printable = next(x for x in text[3:] if x.isascii() and x.isprintable())
    (stopped,) = shared.generate(["hello"], Sampling(max_tokens=40, temperature=0, ignore_end=True, stop=printable))
    assert stopped.text == text[: text.index(printable)]


def test_deadlines_and_cancellation(shared):
    late = shared.add(Request([1, 2], Sampling(max_tokens=200, ignore_end=True), deadline=0.05))
    gone = shared.add(Request([1, 3], Sampling(max_tokens=200, ignore_end=True), id="gone"))
    for _ in range(3):
        shared.step()
    shared.cancel("gone")
    shared.cancel("unknown")
    time.sleep(0.05)
    shared.step()
    assert late.completions[0].finish == "deadline" and gone.completions[0].finish == "cancelled"
    assert len(gone.tokens) == 3 and not shared.busy and shared.pool.used == 0


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request([]), "empty"),
        (Request([257]), "token 257"),
        (Request([0] * 256), "256"),
        (Request([1], Sampling(beams=9, n=9)), "9 beams"),
        (Request([1], Sampling(logit_bias={-1: 1.0})), "token -1"),
        (Request([1], Sampling(schema={"type": "nothing"})), "schema"),
    ],
)
def test_impossible_requests(shared, request_, message):
    with pytest.raises(ValueError, match=message):
        shared.add(request_)
    assert not shared.busy


@pytest.mark.parametrize("options", [
    {"temperature": -1}, {"temperature": math.nan}, {"top_p": 2}, {"max_tokens": 0}, {"n": 0}, {"best_of": 1, "n": 2},
    {"repetition_penalty": 0}, {"stop": ("",)}, {"regex": "a", "schema": {}}, {"beams": 2, "n": 3},
    {"repetition_penalty": 1e-300}, {"allowed": ()}, {"temperature": math.inf}, {"logit_bias": {1: math.nan}},
])  # fmt: skip
def test_impossible_sampling(options):
    with pytest.raises(ValueError):
        Sampling(**options)


def test_plans_that_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="Replicas"):
        engine(plan="dp2", cluster="cpu:2")


def test_folders_that_do_not_exist(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        Engine(tmp_path / "none")


def test_models_that_see_later_tokens_are_refused():
    config = BertConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(ValueError, match="later tokens"):
        engine(BertForMaskedLM(config))


def test_replicas():
    model, prompts = tiny.model(), tiny.prompts(5, 40, 20)
    replicas = Replicas.of(model, 2, plan="single", blocks=32, budget=64, most=4)
    outputs = replicas.generate(prompts, GREEDY)
    assert [x.tokens for x in outputs] == [tiny.greedy(model, x, 12, eos_token_id=None) for x in prompts]
    assert all(x.steps for x in replicas.engines)
    (again,) = replicas.generate([prompts[1]], GREEDY)
    assert again.cached == 32
    assert route([0, 32], [0, 3]) == 1 and route([0, 32], [0, 9]) == 0 and route([0, 0], [2, 1]) == 1


def test_embeddings(shared):
    prompts = tiny.prompts(3, 9)
    embeddings = shared.embed(prompts)
    for prompt, x in zip(prompts, embeddings, strict=True):
        with torch.no_grad():
            hidden = tiny.model().model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(x, hidden / hidden.norm(), atol=1e-5, rtol=1e-4)


def test_a_request_that_fails_does_not_end_the_others(shared):
    """No token is left: the regex wants `a`, which must not end the output yet."""
    a = tiny.tokenizer()("a")["input_ids"][0]
    bad = shared.add(Request("x", Sampling(regex="a{5,9}", min_tokens=5, stop_tokens=(a,), ignore_end=True, n=2)))
    good = shared.add(Request([1, 2], Sampling(max_tokens=5, temperature=0, ignore_end=True)))
    while shared.busy:
        shared.step()
    assert bad.error and bad.completions[0].finish == "error"
    assert good.tokens == tiny.greedy(tiny.model(), [1, 2], 5, eos_token_id=None) and shared.pool.used == 0


def test_new_weights_while_requests_run():
    """What was computed with the old weights is computed again, and never found by others."""
    prompt, other = tiny.prompts(40)[0], tiny.model(seed=5)
    llm = engine()
    output = llm.add(Request(prompt, Sampling(max_tokens=20, temperature=0, ignore_end=True)))
    for _ in range(8):
        llm.step()
    llm.update(other.state_dict())
    done = list(output.tokens)
    while llm.busy:
        llm.step()
    assert output.tokens == done + tiny.greedy(other, prompt + done, 20 - len(done), eos_token_id=None)
    assert llm.generate([prompt], GREEDY)[0].tokens == tiny.greedy(other, prompt, 12, eos_token_id=None)
    before = llm.runner.store["param:model.model.norm.weight"]
    with pytest.raises(ValueError, match="lm_head"):
        llm.update({**tiny.model().state_dict(), "lm_head.weight": torch.zeros(3)})
    assert torch.equal(before, llm.runner.store["param:model.model.norm.weight"])


def test_a_neighbour_with_top_p_changes_nothing():
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    for number in (0.0, 0.3, 0.99999):
        alone = drawn(logits[:1], [Sampling()], [number])
        assert drawn(logits, [Sampling(), Sampling(top_p=0.5)], [number, 0.5])[:1] == alone


def test_the_same_id_twice_reports_the_whole_prompt():
    llm, prompt = engine(), tiny.prompts(39)[0]
    for _ in range(2):
        output = llm.generate([Request(prompt, Sampling(max_tokens=1, prompt_logprobs=0), id="same")])[0]
        assert [x.token for x in output.prompt_logprobs] == prompt[1:]


def test_frozen_parameters_are_shared_until_they_get_other_values():
    model = tiny.model().requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    llm = Engine(model, plan="single", blocks=32, share_frozen=True)
    stored, before = llm.runner.store.parts[0], {name: x.clone() for name, x in model.state_dict().items()}
    for name, x in model.named_parameters():
        assert (stored[f"param:model.{name}"].data_ptr() == x.data_ptr()) == (not x.requires_grad), name
    llm.update(model.state_dict())
    assert stored["param:model.model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
    llm.update({name: x + 1 for name, x in before.items()})
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), "the model is not written into"
        if f"param:model.{name}" in stored:
            assert torch.equal(stored[f"param:model.{name}"], before[name] + 1)
    prompts, sampling = tiny.prompts(5, 9), Sampling(max_tokens=6, temperature=0)
    model.load_state_dict({name: x + 1 for name, x in before.items()})
    expected = Engine(model, plan="single", blocks=32).generate(prompts, sampling)
    assert [x.tokens for x in llm.generate(prompts, sampling)] == [x.tokens for x in expected]
