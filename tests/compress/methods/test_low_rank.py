"""Layers of low rank against closed forms, in models, and in files."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress_models import data, logits, model, small
from tutti.compress import LowRank, Prune, Quantize, Recipe, Scheme, Shrink, compress, load, parse
from tutti.compress.methods.low_rank import factor, rank_of
from tutti.nn.linear.low_rank_linear import LowRankLinear, low_rank_layers
from tutti.nn.quantized.quantized_linear import quantized_layers


def drawn(n: int = 24, k: int = 32, tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (n, k), and inputs (tokens, k) that depend on one another."""
    draw = torch.Generator().manual_seed(0)
    mix = torch.eye(k) + 0.3 * torch.randn(k, k, generator=draw)
    return torch.randn(n, k, generator=draw), torch.randn(tokens, k, generator=draw) @ mix


@pytest.mark.parametrize("shape", [(24, 32), (48, 16)])
@pytest.mark.parametrize("rank", [1, 7, 12])
def test_the_error_is_the_tail_of_the_singular_values(shape, rank):
    weight, x = drawn(*shape)
    a, b, error = factor(weight, rank, x.T @ x)
    singular = torch.linalg.svdvals(weight @ torch.linalg.cholesky(x.T @ x))
    tail = (singular[rank:].square().sum() / singular.square().sum()).sqrt()
    measured = (x @ (weight - b @ a).T).norm() / (x @ weight.T).norm()
    torch.testing.assert_close(measured, tail, rtol=1e-3, atol=1e-5)
    assert error == pytest.approx(float(tail), rel=1e-3, abs=1e-5) and a.shape == (rank, shape[1])


def test_nothing_else_of_this_rank_loses_less():
    weight, x = drawn(6, 5, 80)
    a, b, _ = factor(weight, 2, x.T @ x)
    least = (x @ (weight - b @ a).T).square().sum()
    for seed in range(5):  # alternating least squares, which finds an optimum, from anywhere
        b = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed))
        for _ in range(200):
            a = torch.linalg.lstsq(b, weight).solution
            b = torch.linalg.lstsq(x @ a.T, x @ weight.T).solution.T
        assert (x @ (weight - b @ a).T).square().sum() >= least * (1 - 1e-4)
    u, s, v = torch.linalg.svd(weight)
    assert (x @ (weight - u[:, :2] * s[:2] @ v[:2]).T).square().sum() > 1.01 * least, "of the weight alone"


def test_ranks():
    step = LowRank(0.5, 64)
    assert rank_of(step, 4096, 4096) == 1024 and rank_of(step, 11008, 4096) == 1472
    assert rank_of(step, 256, 256) == 64 and rank_of(step, 128, 128) is None
    assert rank_of(LowRank(0.9, 1), 4, 4) == 1, "two would not be smaller"


def test_a_model_is_smaller_and_is_read_again(tmp_path):
    model, batches = small(), data()
    compressed = compress(model, LowRank(0.5, 8), batches)
    assert len(low_rank_layers(compressed.model)) == 21 and "rank 8" in str(compressed.report)
    assert compressed.report.after == sum(x.nbytes for x in compressed.model.parameters()) < compressed.report.before
    assert compressed.model.generate(batches[0]["input_ids"][:1], max_new_tokens=3, do_sample=False).shape == (1, 19)
    with pytest.warns(UserWarning, match="transformers cannot load layers of low rank"):
        compressed.save(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(compressed.model))
    with pytest.raises(ValueError, match="no `quant_method`"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match=r"GGUF export does not know the tensor .*q_proj.a.weight"):
        compressed.save(tmp_path / "out.gguf", format="gguf")
    owned = {x.data_ptr() for x in model.parameters()}
    assert not any(x.data_ptr() in owned for x in compressed.model.parameters())


def test_the_error_of_a_layer_is_that_of_its_outputs_on_the_data():
    model, batches, seen = small(layers=1), data(), []
    path = "model.layers.0.self_attn.q_proj"
    hook = model.get_submodule(path).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for batch in batches:
        model(**batch)
    hook.remove()
    compressed = compress(model, LowRank(0.5, 4, layers=("q_proj",)), batches)
    x = torch.cat([y.flatten(0, 1) for y in seen])
    with torch.no_grad():
        wanted, outputs = (m.get_submodule(path)(x) for m in (model, compressed.model))
    (report,) = compressed.report.layers
    assert report.tokens == len(x) and report.error == pytest.approx(((wanted - outputs).norm() / wanted.norm()).item(),
                                                                     rel=1e-3)  # fmt: skip


@pytest.mark.filterwarnings("ignore:transformers cannot load layers")
def test_factors_are_pruned_quantized_and_learn(tmp_path):
    batches = data()
    step = Recipe((LowRank(0.6, 8), Prune(pattern="2:4", method="wanda")))
    compressed = compress(model(), step + parse("int4-g8-gptq+distill-2"), batches)
    assert len(low_rank_layers(compressed.model)) == 14 and len(quantized_layers(compressed.model)) == 28
    compressed.save(tmp_path / "out")
    again = load(tmp_path / "out")
    assert torch.equal(logits(again), logits(compressed.model))
    a = again.model.layers[0].mlp.up_proj.a
    assert a.scheme == Scheme(4, 8) and float((a.dequantize() == 0).float().mean()) >= 0.5


def test_a_layer_keeps_its_bias_and_dtype():
    layer = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    low_rank = LowRankLinear.like(layer, 4)
    assert low_rank.b.bias is layer.bias and low_rank.weight.shape == (16, 32) and low_rank.a.bias is None
    low_rank.a.weight.zero_()
    low_rank.b.weight.zero_()
    assert torch.equal(low_rank(torch.ones(2, 3, 32, dtype=torch.bfloat16))[0, 0], layer.bias)


def test_names(tmp_path):
    assert parse("lowrank-0.5+int4-gptq").steps == (LowRank(0.5), Quantize(Scheme(4), "gptq"))
    assert parse("lowrank-0.7-multiple32").steps == (LowRank(0.7, 32),)
    file = tmp_path / "recipe.toml"
    file.write_text('[[step]]\nkind = "lowrank"\nshare = 0.7\nmultiple = 8\nignore = ["lm_head", "*.v_proj"]\n')
    assert parse(str(file)).steps == (LowRank(0.7, 8, ignore=("lm_head", "*.v_proj")),)


@pytest.mark.parametrize(
    ("kind", "recipe", "message"),
    [
        ("llama", LowRank(), "no layer becomes smaller with a rank that is a multiple of 64"),
        ("llama", LowRank(ignore=("*.nothing",)), "matches no layer"),
        ("llama", "lowrank-0.5-multiple8+int4-g16", r"q_proj.b has 8 inputs, which groups of 16 do not divide"),
        ("mixtral", LowRank(multiple=8), "experts such as .* do not get a lower rank"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(kind, recipe, message, monkeypatch):
    monkeypatch.setattr("tutti.compress.methods.low_rank.factored", None)
    with pytest.raises(ValueError, match=message):
        compress(small(kind), recipe, data())


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((LowRank(), Shrink(heads=0.5)), "shrink does not know layers that are products: put it before lowrank"),
        ((Prune(), LowRank()), "lowrank would fill zeros again"),
        ((Quantize(), LowRank()), "a quantized model is only distilled: put lowrank before"),
    ],
)
def test_orders_that_are_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        Recipe(steps)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        LowRank(1.0)
