"""Models of transformers, into any plan: each rank reads its slices of the safetensors files."""

from __future__ import annotations

import pytest
import torch
import transformers

import tutti
import zoo
from cases import crossed


def parallelized(model, plan="tp2", devices=2, **options) -> tutti.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.parallelize(model, optimizer, zoo.tokens(), cluster=f"cpu:{devices}", plan=plan, level="O0", **options)


@pytest.mark.parametrize("shard, plan", crossed(["5GB", "50KB"], ["single", "tp2", "zero3", "pp2"]))
def test_a_saved_model_is_what_is_trained(plan, shard, tmp_path):
    other = zoo.llama(seed=3)
    other.save_pretrained(tmp_path, max_shard_size=shard)
    devices = 1 if plan == "single" else 2
    step = parallelized(zoo.llama(), plan, devices, accumulate=2)
    count = step.load(tmp_path)
    for name, value in other.state_dict().items():
        assert torch.equal(step.state_dict()[name], value), name
    assert count == sum(p.nbytes for p in other.parameters())


def test_tied_weights_are_found_by_either_name(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=zoo.VOCABULARY, n_positions=16)
    torch.manual_seed(3)
    other = transformers.GPT2LMHeadModel(config)
    other.save_pretrained(tmp_path)
    step = parallelized(transformers.GPT2LMHeadModel(config))
    step.load(tmp_path)
    for name, value in other.state_dict().items():
        assert torch.equal(step.state_dict()[name], value), name


def test_float32_copies_are_read_too(tmp_path):
    zoo.llama(seed=3).bfloat16().save_pretrained(tmp_path)
    step = parallelized(zoo.llama().bfloat16(), fp32_master_weights=True)
    step.load(tmp_path)
    state = step.training_state()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(state[f"master:{name}"], state[f"param:{name}"].float())


def test_another_model_is_refused_and_nothing_has_changed(tmp_path):
    step = parallelized(zoo.llama())
    before = step.state_dict()
    zoo.llama(1).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"has no 'model\.layers\.1\..*from_pretrained\) before tutti\.parallelize"):
        step.load(tmp_path / "small")
    config = transformers.LlamaConfig(**{**zoo.llama().config.to_dict(), "intermediate_size": 32})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "thin")
    with pytest.raises(ValueError, match=r"_proj\.weight has \(.*32.*\) in .*, \(.*96.*\) is wanted"):
        step.load(tmp_path / "thin")
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict().items())
