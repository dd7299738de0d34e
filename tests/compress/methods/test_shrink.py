"""Structured pruning: what is removed, what is left, and that `transformers` loads it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import compress_models
from compress_models import data, small
from tutti.compress import Shrink
from tutti.compress.methods.shrink import count_of, least_squares, shrink

CASES = {
    "heads": ("llama", Shrink(heads=0.5), {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "channels": ("llama", Shrink(channels=0.5), {"intermediate_size": 32}),
    "layers": ("llama", Shrink(layers=1), {"num_hidden_layers": 2}),
    "norms of heads": ("qwen3", Shrink(0.5, 0.5), {"num_attention_heads": 2, "head_dim": 16}),
    "experts": ("mixtral", Shrink(experts=0.5), {"num_local_experts": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_what_is_left(name, tmp_path):
    kind, step, sizes = CASES[name]
    model, batches = small(kind), data()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    shrunk, removed = shrink(model, step, batches)
    assert {key: getattr(shrunk.config, key) for key in sizes} == sizes
    assert all(torch.equal(before[key], x) for key, x in model.state_dict().items())
    assert sum(x.numel() for x in shrunk.parameters()) < sum(x.numel() for x in model.parameters())
    shrunk.save_pretrained(tmp_path)
    again, about = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"]
    assert torch.equal(again.eval()(**batches[0]).logits, shrunk(**batches[0]).logits)
    assert again.generate(batches[0]["input_ids"][:1], max_new_tokens=3, do_sample=False).shape == (1, 19)
    assert removed.counts


def test_channels_that_do_nothing_are_removed_without_a_loss():
    model, batches = small(), data()
    for layer in model.model.layers:
        idle = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:32]
        layer.mlp.up_proj.weight.data[idle] = 0
    shrunk, removed = shrink(model, Shrink(channels=0.5), batches)
    assert max(removed.errors.values()) < 1e-5
    torch.testing.assert_close(shrunk(**batches[0]).logits, model(**batches[0]).logits, atol=1e-5, rtol=0)


def test_the_fit_is_that_of_least_squares():
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(200, 12, generator=generator, dtype=torch.float64)
        @ torch.randn(12, 12, generator=generator).double()
    )
    weight, keep = torch.randn(5, 12, generator=generator).double(), torch.tensor([0, 3, 4, 8, 9])
    fitted = least_squares(weight, x.T @ x, keep)
    best = torch.linalg.lstsq(x[:, keep], x @ weight.T).solution.T
    loss, least = ((x @ weight.T - x[:, keep] @ w.T).square().sum() for w in (fitted, best))
    cut = (x @ weight.T - x[:, keep] @ weight[:, keep].T).square().sum()
    assert least <= loss <= 1.05 * least < cut


@pytest.mark.parametrize("options", [{"mlp_only_layers": [1, 3]}, {"decoder_sparse_step": 2}])
def test_layers_with_and_without_experts(options, tmp_path):
    model = compress_models.model("qwen3-moe", hidden_size=32, num_hidden_layers=4, **options)
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    for name in ("down_proj", "experts.down_proj"):
        with suppress(AttributeError):
            model.model.layers[0].mlp.get_parameter(f"{name}.weight" if name == "down_proj" else name).data.zero_()
    shrunk, _ = shrink(model, Shrink(layers=1), data())
    torch.testing.assert_close(shrunk(**data()[0]).logits, model(**data()[0]).logits)
    shrunk.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(**data()[0]).logits, shrunk(**data()[0]).logits)


def test_the_layer_that_does_least_is_removed():
    model = small()
    for x in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        x.weight.data.zero_()
    shrunk, _ = shrink(model, Shrink(layers=1), data())
    torch.testing.assert_close(shrunk(**data()[0]).logits, model(**data()[0]).logits)


def test_experts_that_no_token_is_given_are_removed_without_a_loss():
    model, batches = small("mixtral"), data()
    for layer in model.model.layers:
        router = layer.mlp.gate.weight.data
        router[2:] = router[2:] * 1e-3 - router[:2].sum(0) * 10  # never among the first two
    used = shrink(model, Shrink(experts=0.5), batches)[0]
    assert used.config.num_local_experts == 2


def test_padding_does_not_count():
    model, (batch, *_) = small(), data()
    padded = torch.cat([batch["input_ids"], torch.full((4, 8), 7)], 1)
    mask = torch.ones_like(padded)
    mask[:, 16:] = 0
    a, _ = shrink(model, Shrink(0.5, 0.5, layers=1), [batch])
    b, _ = shrink(model, Shrink(0.5, 0.5, layers=1), [{"input_ids": padded, "attention_mask": mask}])
    for name, x in a.state_dict().items():
        torch.testing.assert_close(b.state_dict()[name], x, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        ("llama", Shrink(layers=3), "the model has 3 layers: 3 cannot be removed"),
        ("llama", Shrink(experts=0.5), "experts=0.5 does not fit it"),
        ("gpt-oss", Shrink(heads=0.5), r"sinks of \(4,\), which is not of one head"),
        ("olmo2", Shrink(heads=0.5), r"q_norm.weight of \(32,\), which is not of one head"),
        ("qwen2-moe", Shrink(channels=0.5), "an MLP beside its experts"),
        ("mixtral", Shrink(experts=0.25), "each token is given to 2 experts: 1 are too few"),
        ("llama", Shrink(heads=0.1), "a share of 0.1 of 2 key and value heads leaves 0"),
    ],
)
def test_what_does_not_fit_is_refused(kind, step, message):
    with pytest.raises(ValueError, match=message):
        shrink(small(kind), step, data())


def test_counts_are_what_kernels_divide():
    assert count_of(1000, 0.7, "channels") == 704
    assert count_of(64, 0.3, "channels") == 19
    with pytest.raises(ValueError, match="choose another share"):
        count_of(128, 0.99, "channels")
