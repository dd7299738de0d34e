"""Guesses never change the output; adapters give what `peft` gives, request by request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import tiny
import torch

from tutti.serve import DraftModel, Engine, PromptLookup, Request, Sampling


def engine(**options) -> Engine:
    return Engine(tiny.model(), **{"plan": "single", "blocks": 64, "budget": 64, "most": 8, **options})


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine()


@pytest.mark.parametrize("other, accepts", [({}, 1.0), ({"seed": 1, "num_hidden_layers": 1}, 0)], ids=["same", "other"])
def test_a_draft_model_does_not_change_the_output(plain, other, accepts):
    prompts, draft = tiny.prompts(5, 40, 21), DraftModel(tiny.model(**other), 3, plan="single")
    llm = engine(speculate=draft)
    for temperature in (0.0, 0.8):
        sampling = Sampling(max_tokens=16, temperature=temperature, seed=1, ignore_end=True)
        steps, guessed, accepted = llm.steps, llm.guessed, llm.accepted
        outputs = llm.generate(prompts, sampling)
        assert [x.tokens for x in outputs] == [x.tokens for x in plain.generate(prompts, sampling)]
        assert llm.accepted - accepted >= 0.9 * accepts * (llm.guessed - guessed) > 0 or not accepts
        assert llm.steps - steps <= (6 if accepts else 18)
        llm.generate(prompts[:1], sampling)
        assert draft.pool.used <= 4  # what the last sequence had


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 300"):
        engine(speculate=DraftModel(tiny.model(vocab_size=300), plan="single"))


class Sure(PromptLookup):
    """Guesses as many tokens as it may, whatever came before."""

    def guess(self, sequences, choose):
        return [[7] * self.count for _ in sequences]


def test_no_token_is_guessed_beyond_the_last(plain):
    """A step adds a token of its own to those that it verifies, so n tokens leave n - 2 guesses after the first."""
    served, prompt = engine(speculate=Sure(4), longest=24), tiny.prompts(20)[0]
    for count, guesses in ((1, 0), (2, 0), (3, 1)):
        before, sampling = served.guessed, Sampling(max_tokens=count, temperature=0, ignore_end=True)
        (output,) = served.generate([prompt], sampling)
        assert output.tokens == plain.generate([prompt], sampling)[0].tokens and len(output.tokens) == count
        assert served.guessed - before == guesses


def test_prompt_lookup_finds_what_followed():
    lookup, prompt = PromptLookup(3, longest=3, shortest=1), [1, 2, 3, 4, 5, 1, 2, 3]
    llm = engine()
    output = llm.add(Request(prompt, Sampling(max_tokens=2)))
    (sequence,) = llm.scheduler
    assert lookup.guess([sequence], lambda *_: []) == [[4, 5, 1]]
    sequence.tokens.append(9)
    assert lookup.guess([sequence], lambda *_: []) == [[]]
    assert not output.finished


PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, str]:
    """Two adapters of different layers and ranks, with random factors."""
    folders = {}
    for i, (name, layers) in enumerate({"small": ["q_proj", "v_proj"], "large": ["q_proj", "down_proj"]}.items()):
        torch.manual_seed(i)
        config = peft.LoraConfig(r=2 + 2 * i, lora_alpha=8, target_modules=layers, use_rslora=bool(i))
        model = peft.get_peft_model(tiny.model(), config)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "lora_" in key:
                    p.normal_(0, 0.3)
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
    return folders


@PEFT
def test_each_request_has_its_adapter(adapters):
    prompt, sampling = tiny.prompts(20)[0], Sampling(max_tokens=8, temperature=0, ignore_end=True)
    llm = engine(adapters=adapters)
    outputs = llm.generate([Request(prompt, sampling, adapter=x) for x in ("", "small", "large")])
    for name, output in zip(("", "small", "large"), outputs, strict=True):
        model = peft.PeftModel.from_pretrained(tiny.model(), adapters[name]) if name else tiny.model()
        expected = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=8,
                                  eos_token_id=None)  # fmt: skip
        assert output.tokens == expected[0, len(prompt) :].tolist()
    assert len({tuple(x.tokens) for x in outputs}) == 3
    again = llm.generate([Request(prompt, sampling, adapter="small")])[0]
    assert again.cached == 16 and again.tokens == outputs[1].tokens  # its own blocks
    split = engine(adapters=adapters, plan="tp2", cluster="cpu:2")
    assert split.generate([Request(prompt, sampling, adapter="large")])[0].tokens == outputs[2].tokens


@PEFT
def test_unfit_adapters_are_refused(adapters, tmp_path):
    with pytest.raises(ValueError, match="no adapter 'other'; there is small, large"):
        engine(adapters=adapters).add(Request([1], adapter="other"))
    with pytest.raises(ValueError, match="no adapter"):
        engine().add(Request([1], adapter="small"))
    with pytest.raises(ValueError, match="no adapter of peft"):
        engine(adapters={"a": tmp_path})
    with pytest.raises(ValueError, match="another model"):
        Engine(tiny.model(hidden_size=64), plan="single", blocks=8, adapters=adapters)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    shutil.copy(Path(adapters["small"], "adapter_model.safetensors"), tmp_path)
    with pytest.raises(ValueError, match="IA3"):
        engine(adapters={"a": tmp_path})


@PEFT
def test_blocks_are_copied_beside_adapters(adapters):
    """Two sequences of a request part within a block; only the cache has blocks."""
    prompt, sampling = tiny.prompts(20)[0], Sampling(max_tokens=6, n=2, seed=3, ignore_end=True)
    tokens = [[x.tokens for x in engine(adapters=adapters, **options).generate(
        [Request(prompt, sampling, adapter="small")])[0].completions] for options in ({}, {"block": 4})]  # fmt: skip
    assert tokens[0] == tokens[1] and tokens[0][0] != tokens[0][1]
