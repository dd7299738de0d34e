"""Models with an encoder, of text, of speech and of images, give the tokens of `transformers`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers as t

import encoder_models as encoders
from tutti.serve import Engine, Request, Sampling
from tutti.serve.apart.disaggregate import Disaggregated
from tutti.serve.apart.replicas import Replicas
from tutti.serve.engine.draft import DraftModel

GREEDY = Sampling(max_tokens=12, temperature=0, ignore_end=True)
PLANS = {"tp2": 2, "pp2": 2, "pp2xtp2": 4}


def engine(model: Any, **options: Any) -> Engine:
    return Engine(model, **{"plan": "single", "blocks": 64, "budget": 32, "most": 4, **options})


def requests(sources: list[dict[str, Any]], sampling: Sampling = GREEDY) -> list[Request]:
    return [Request(sampling=sampling, **x) for x in sources]


@pytest.mark.parametrize("family", encoders.FAMILIES)
def test_families(family):
    model, sources = encoders.model_of(family), encoders.sources(family)
    wanted = [encoders.expected(model, x, 12) for x in sources]
    llm = engine(model)
    for _ in range(2):  # the second time, sources are in the cache
        assert [x.tokens for x in llm.generate(requests(sources), GREEDY)] == wanted
    assert llm.pool.used == 0
    assert llm.runner.encoding.calls == len(sources)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["T5", "Whisper"])
def test_plans(family, plan):
    model, sources = encoders.model_of(family), encoders.sources(family)
    llm = engine(model, plan=plan, cluster=f"cpu:{PLANS[plan]}")
    wanted = [encoders.expected(model, x, 12) for x in sources]
    assert [x.tokens for x in llm.generate(requests(sources), GREEDY)] == wanted


@pytest.mark.parametrize("options", [{"blocks": 7}, {"blocks": 7, "host_memory": 1 << 20}, {"prefix_cache": False},
                                     {"speculate": 3}, {"block": 4}], ids=str)  # fmt: skip
def test_options(options):
    model, sources = encoders.model_of("T5"), encoders.sources("T5")
    llm, long = engine(model, **options), Sampling(max_tokens=40, temperature=0, ignore_end=True)
    wanted = [encoders.expected(model, x, 40) for x in sources]
    assert [x.tokens for x in llm.generate(requests(sources, long))] == wanted
    assert bool(llm.scheduler.preemptions) == ("blocks" in options) and llm.pool.used == 0


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_nothing_is_captured_after_warming_up(kind):
    model = encoders.model_of("T5") if kind == "texts" else encoders.llava()
    llm = engine(model, budget=16, blocks=8)
    llm.warm_up()
    ready, captured = len(llm.runner.ready), len(llm.runner.encoding._executables)
    sources = encoders.sources("T5") if kind == "texts" else seen(1, 2, 3)
    llm.generate(requests(sources))
    assert len(llm.runner.ready) == ready and len(llm.runner.encoding._executables) == captured and llm.pool.used == 0


def test_requests_of_one_source_share_it():
    model, source = encoders.model_of("T5"), encoders.sources("T5")[1]
    sampling = Sampling(max_tokens=8, n=3, seed=1, ignore_end=True)
    llm = engine(model)
    (first,) = llm.generate(requests([source], sampling))
    llm.generate(requests([source]))
    assert llm.runner.encoding.calls == 1 and llm.pool.used == 0
    (alone,) = engine(model).generate(requests([source], sampling))
    assert [x.tokens for x in first.completions] == [x.tokens for x in alone.completions]
    assert len({tuple(x.tokens) for x in first.completions}) == 3


def test_beams_are_those_of_transformers():
    model, source = encoders.model_of("BART"), encoders.sources("BART")[1]
    (output,) = engine(model).generate(requests([source], Sampling(max_tokens=9, beams=3, n=3)))
    generated = model.generate(torch.tensor([source["prompt"]]), do_sample=False, num_beams=3, num_return_sequences=3,
                               max_new_tokens=9)  # fmt: skip
    for completion, row in zip(output.completions, generated, strict=True):
        assert completion.tokens == row[1 : 1 + len(completion.tokens)].tolist()


def test_a_decoder_begins_with_given_tokens():
    model, source = encoders.model_of("T5"), encoders.sources("T5")[1]
    begun = torch.tensor([[0, 7, 9]])
    (output,) = engine(model).generate(requests([{**source, "inputs": {"decoder_input_ids": begun}}]))
    generated = model.generate(torch.tensor([source["prompt"]]), decoder_input_ids=begun, do_sample=False,
                               max_new_tokens=12, eos_token_id=None)  # fmt: skip
    assert output.tokens == generated[0, 3:].tolist()


def test_engines_side_by_side():
    model, sources = encoders.model_of("Whisper"), encoders.sources("Whisper")
    replicas = Replicas.of(model, 2, plan="single", blocks=32, budget=64, most=4)
    wanted = [encoders.expected(model, x, 12) for x in sources]
    assert [x.tokens for x in replicas.generate(requests(sources))] == wanted


@pytest.mark.parametrize("longest", [None, 100])
def test_how_long_a_source_may_be(longest):
    """T5 has no limit: its engine has one."""
    runner = engine(encoders.model_of("T5"), blocks=4000, longest=longest).runner
    assert runner.encoder.longest == (longest or 2048)
    assert {x["input_ids"].shape[1] for x in runner.encoder.shapes()} >= {16, 64, runner.encoder.longest}


def test_prefill_and_decode_apart():
    model, sources = encoders.model_of("T5"), encoders.sources("T5")
    disaggregated = Disaggregated(engine(model), engine(model))
    wanted = [encoders.expected(model, x, 12) for x in sources]
    assert [x.tokens for x in disaggregated.generate(requests(sources))] == wanted


@pytest.mark.parametrize("family", ["T5", "Whisper"])
def test_a_folder_with_new_weights(family, tmp_path):
    model, sources = encoders.model_of(family), encoders.sources(family)
    model.save_pretrained(tmp_path)
    llm = engine(tmp_path)
    assert [x.tokens for x in llm.generate(requests(sources))] == [encoders.expected(model, x, 12) for x in sources]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    llm.update(model.state_dict())
    assert [x.tokens for x in llm.generate(requests(sources))] == [encoders.expected(model, x, 12) for x in sources]


# -- images ------------------------------------------------------------------------------------------------------------


def seen(*counts: int) -> list[dict[str, Any]]:
    """Prompts with so many images."""
    draw = torch.Generator().manual_seed(0)
    prompts = []
    for i, n in enumerate(counts):
        tokens = torch.randint(10, 250, (5 + 7 * i,), generator=draw).tolist()
        images = torch.randn(n, 3, 16, 16, generator=draw)
        prompts.append(
            {"prompt": tokens[:2] + [9] * 4 * n + tokens[2:], "inputs": {"pixel_values": images} if n else {}}
        )
    return prompts


def generated_tokens(model: Any, prompts: list[dict[str, Any]]) -> list[list[int]]:
    generated = [model.generate(torch.tensor([x["prompt"]]), do_sample=False, max_new_tokens=12, eos_token_id=None,
                                **x["inputs"]) for x in prompts]  # fmt: skip
    return [x[0, len(p["prompt"]) :].tolist() for x, p in zip(generated, prompts, strict=True)]


@pytest.mark.parametrize("plan, devices", [("single", 1), ("tp2", 2), ("pp2", 2)])
def test_images(plan, devices):
    """In chunks of the prompt that end within an image."""
    model, prompts = encoders.llava(), seen(0, 1, 2)
    llm = engine(model, plan=plan, cluster=f"cpu:{devices}", budget=8)
    assert [x.tokens for x in llm.generate(requests(prompts))] == generated_tokens(model, prompts)
    again = llm.generate(requests(prompts))
    assert [x.tokens for x in again] == generated_tokens(model, prompts) and again[2].cached
    other = {"prompt": prompts[2]["prompt"], "inputs": {"pixel_values": prompts[2]["inputs"]["pixel_values"].flip(0)}}
    (flipped,) = llm.generate(requests([other]))
    assert flipped.tokens == generated_tokens(model, [other])[0] != again[2].tokens and not flipped.cached


def test_new_weights_change_what_is_seen():
    model, (prompt,) = encoders.llava(), seen(2)
    llm = engine(model, budget=8)
    output = llm.add(requests([prompt])[0])
    llm.step()
    assert not output.tokens  # a part of its prompt is computed
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.2)
    llm.update(model.state_dict())
    llm.generate([])
    while llm.busy:
        llm.step()
    assert not output.cached and output.tokens == generated_tokens(model, [prompt])[0]


def test_models_whose_images_are_not_read_answer_texts():
    config = t.LlavaNextConfig(**encoders.llava().config.to_dict() | {"model_type": "llava_next"})
    model = t.LlavaNextForConditionalGeneration(config).eval()
    llm = engine(model)
    expected = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].tokens == expected[0, 3:].tolist()
    with pytest.raises(ValueError, match="tokens only"):
        llm.add(Request([9], inputs={"pixel_values": torch.ones(1, 3, 16, 16)}))


def test_images_of_a_folder(tmp_path):
    """Its tensors have other names than those of the model."""
    model, prompts = encoders.llava(), seen(1)
    model.save_pretrained(tmp_path)
    assert [x.tokens for x in engine(tmp_path).generate(requests(prompts))] == generated_tokens(model, prompts)


@pytest.fixture(scope="module")
def engines():
    """An engine for each family, created when a test first asks for it."""
    return functools.cache(lambda family: engine(encoders.llava() if family == "LLaVA" else encoders.model_of(family)))


@pytest.mark.parametrize("family, request_, message", [
    ("T5", {"prompt": []}, "empty"),
    ("T5", {"prompt": [300]}, "token 300"),
    ("T5", {"prompt": [5] * 2000}, "2000"),
    ("T5", {"prompt": [5] * 1020}, "does not fit"),
    ("T5", {"prompt": [5], "inputs": {"input_features": torch.ones(1)}}, "reads tokens"),
    ("Whisper", {"prompt": [5]}, "input_features"),
    ("Whisper", {"prompt": [], "inputs": {"input_features": torch.ones(1, 16, 50)}}, "shape"),
    ("Whisper", {"prompt": [], "inputs": {"input_features": torch.full((1, 16, 120), torch.nan)}}, "finite"),
    ("Whisper", {"prompt": [], "inputs": {"input_features": torch.ones(2, 16, 120)}}, "2 rows"),
    ("LLaVA", {"prompt": [9, 9]}, "2 image tokens"),
    ("LLaVA", {"prompt": [9, 9], "inputs": {"pixel_values": torch.ones(1, 3, 16, 16)}}, "4 positions"),
    ("LLaVA", {"prompt": [9], "inputs": {"pixels": torch.ones(1)}}, "'pixels'"),
    ("LLaVA", {"prompt": [5], "inputs": {"pixel_values": torch.ones(0, 3, 16, 16)}}, "no images"),
    ("LLaVA", {"prompt": [5], "inputs": {"pixel_values": "a"}}, "not a tensor"),
    ("T5", {"prompt": [5], "inputs": {"decoder_input_ids": torch.ones(2, 2).long()}}, r"\(1, n\)"),
])  # fmt: skip
def test_impossible_requests(family, request_, message, engines):
    with pytest.raises(ValueError, match=message):
        engines(family).add(Request(**request_))
    assert not engines(family).busy


def test_what_an_encoder_does_not_allow():
    model = encoders.model_of("T5")
    with pytest.raises(ValueError, match="beams"):
        engine(model, blocks=7).add(Request([5] * 37, Sampling(beams=3, max_tokens=20)))
    with pytest.raises(ValueError, match="draft"):
        engine(model, speculate=DraftModel(model))
    with pytest.raises(ValueError, match="embeddings"):
        engine(model).embed([[1, 2]])
