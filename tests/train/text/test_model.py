import pytest
import torch
from transformers import AutoModelForCausalLM

from tutti.train.text.config import Model, Optimizer
from tutti.train.text.model import build_model, build_optimizer, check_model, model_config, precision


def test_a_config_of_transformers_with_the_vocabulary_of_the_text():
    config = model_config(Model("llama", 64, 2, 4, {"intermediate_size": 96}), vocab_size=300, seq=4096)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 300)
    assert config.max_position_embeddings == 4096 and config.eos_token_id == 0


def test_gpt2_is_given_the_same_keys():
    config = model_config(Model("gpt2", 64, 2, 4, {"n_inner": 96}), vocab_size=300, seq=32)
    assert (config.n_embd, config.n_layer, config.n_head, config.n_inner, config.n_positions) == (64, 2, 4, 96, 1024)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model("lama"), r"transformers has no model type 'lama' \(model\.type\); did you mean llama\?"),
        (
            Model(options={"intermediate_sise": 8}),
            r"LlamaConfig has no option intermediate_sise \(model\.options\); did you mean intermediate_size\?",
        ),
        (Model(options={"intermediate_size": "a"}), r"not valid: .*'intermediate_size' expected int"),
        (Model(num_attention_heads=3), r"hidden size \(256\) is not a multiple of .*heads \(3\)"),
    ],
)
def test_a_model_that_cannot_be_is_an_error(model, message):
    with pytest.raises(ValueError, match=message):
        model_config(model, 300, 16)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model("gpt2", 33, 1, 2), r"cannot build this gpt2 model \(\[model\] .*ValueError: `embed_dim` must be div"),
        (Model("vit", 32, 1, 2), r"cannot build this vit model .*Unrecognized configuration class .*ViTConfig"),
        (Model(options={"hidden_act": "sillu"}), r"cannot build this llama model .*KeyError: 'sillu'$"),
        (Model(options={"intermediate_size": -3}), "cannot build this llama model .*negative dimension -3"),
    ],
)
def test_a_config_that_makes_no_model_is_one_line(model, message):
    with pytest.raises(ValueError, match=message) as error:
        check_model(model, 300, 16)
    assert "\n" not in str(error.value)


def test_the_weights_depend_on_the_seed_alone():
    config = model_config(Model("llama", 32, 1, 2), 300, 16)
    one, same, other = (build_model(config, seed, torch.float32).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    half = build_model(config, 1, torch.bfloat16).state_dict()
    assert torch.equal(half["lm_head.weight"], one["lm_head.weight"].bfloat16())


@pytest.mark.parametrize(("name", "kind"), [("adamw", "AdamW"), ("adam", "Adam"), ("sgd", "SGD")])
def test_matrices_decay_and_vectors_do_not(name, kind):
    model = build_model(model_config(Model("llama", 32, 1, 2), 300, 16), 0, torch.float32)
    optimizer = build_optimizer(model, Optimizer(name, lr=0.5, weight_decay=0.3))
    assert type(optimizer).__name__ == kind
    decay = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {n: decay[p] for n, p in model.named_parameters()} == {
        n: 0.0 if n.endswith("norm.weight") else 0.3 for n, _ in model.named_parameters()
    }
    assert all(g["lr"] == 0.5 for g in optimizer.param_groups)


def test_precision_is_what_is_asked_for():
    assert precision("float32", 1) is torch.float32
    assert precision("bfloat16", 1) is torch.bfloat16


def test_automatic_precision_is_the_faster_one(monkeypatch):
    from tutti import hardware
    from tutti.train.text import model

    fast = hardware.Device("x", {"float32": 1e12, "bfloat16": 4e12}, 1e9, 1e9)
    slow = hardware.Device("x", {"float32": 1e12, "bfloat16": 2e11}, 1e9, 1e9)
    link = hardware.Link(1e9, 1e-6)
    for device, dtype in ((fast, torch.bfloat16), (slow, torch.float32)):
        monkeypatch.setattr(model, "local", lambda n, d=device: hardware.Cluster(d, ((n, link),)))
        assert precision("auto", 2) is dtype


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "falcon"])
def test_tensors_have_the_dtypes_of_transformers(kind):
    config = model_config(Model(kind, 32, 2, 2), 50, 16)
    ours = build_model(config, 0, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    buffers = dict(theirs.named_buffers())
    assert buffers and any(x.dtype == torch.float32 for x in buffers.values())
    for name, x in [*ours.named_parameters(), *ours.named_buffers()]:
        assert x.dtype == theirs.get_parameter(name).dtype if name not in buffers else torch.equal(x, buffers[name])
