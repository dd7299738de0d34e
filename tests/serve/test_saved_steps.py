"""An engine reads the captured steps of an earlier one for the same model, and captures those of any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tutti.api import store
from tutti.hardware import machine
from tutti.serve import Engine, Request, Sampling
from tutti.serve.engine.saved_steps import Indescribable, described, graphs_of

OPTIONS = {"blocks": 16, "budget": 16, "most": 2, "longest": 32}


def llama(layers: int = 2, **options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         **options)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(engine: Engine) -> list[int]:
    (output,) = engine.generate([Request([5, 6, 7], Sampling(max_tokens=6, temperature=0.0))])
    return output.completions[0].tokens


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "FOLDER", tmp_path / "cache")
    monkeypatch.delenv("TUTTI_PLANS")
    return tokens(Engine(llama(), **OPTIONS))


@pytest.fixture
def no_capture(saved, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the model's code was traced")

    monkeypatch.setattr(store, "capture_function", never)


def test_the_steps_of_an_equal_model_are_not_captured_again(saved, no_capture):
    assert tokens(Engine(llama(), **OPTIONS)) == saved


@pytest.mark.parametrize("other", [lambda: llama(3), lambda: llama(rms_norm_eps=0.1), lambda: llama().bfloat16()])
def test_another_model_is_captured(saved, no_capture, other):
    with pytest.raises(AssertionError, match="was traced"):
        Engine(other(), **OPTIONS)


def test_steps_that_nothing_compares_with_the_model_are_captured(saved, no_capture):
    with pytest.raises(AssertionError, match="was traced"):
        Engine(llama(), self_check=False, **OPTIONS)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"nodes": [["call_function", "x", "op os.system.x", [], {}]]}'])
def test_a_damaged_file_is_written_again(saved, content):
    files = [x for x in (machine.FOLDER / "captures").rglob("*.json") if x.name != "facts.json"]
    assert len(files) >= 2
    for file in files:
        file.write_text(content)
    assert tokens(Engine(llama(), **OPTIONS)) == saved
    assert all(file.read_text() != content for file in files)


def test_a_changed_attribute_changes_the_description():
    model, before = llama(), repr(described(llama()))
    assert repr(described(model)) == before
    model.model.layers[1].self_attn.scaling *= 2
    assert repr(described(model)) != before


def test_shared_tensors_change_the_description():
    tied = llama()
    tied.lm_head.weight = tied.model.embed_tokens.weight  # which the config does not say
    assert repr(described(tied)) != repr(described(llama()))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.helper = nn.Parameter(torch.ones(2)), object()


def test_models_that_have_no_description_are_captured_each_time(saved):
    hooked = llama()
    hooked.model.norm.register_forward_hook(lambda module, args, output: output * 2)
    for model, reason in ((hooked, "hooks"), (Layer(), "an attribute of type object")):
        assert graphs_of(model) is None
        with pytest.raises(Indescribable, match=reason):
            described(model)
