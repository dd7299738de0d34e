import pytest
import torch
from transformers import AutoModelForCausalLM

from tutti.models.pangu_alpha import SIZES, PanGuAlphaConfig, PanGuAlphaForCausalLM, config_of

TINY = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "max_position_embeddings": 16, "pad_token_id": 0}  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return PanGuAlphaForCausalLM(PanGuAlphaConfig(**TINY))


def ids(rows=4, tokens=8):
    return torch.randint(1, 40, (rows, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("size", "published", "within"), [("2.6B", 2.6e9, 0.02), ("13B", 13.1e9, 0.03),
                                                           ("200B", 207.0e9, 0.001)])  # fmt: skip
def test_published_sizes(size, published, within):
    """Table 1 of the paper. A layer has 12 h^2 + 13 h parameters."""
    with torch.device("meta"):
        model = PanGuAlphaForCausalLM(config_of(size))
    layers, h, _ = SIZES[size]
    assert sum(p.numel() for p in model.parameters()) == layers * (12 * h * h + 13 * h) + (40000 + 2 * 1024) * h + 2 * h
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(published, rel=within)
    with pytest.raises(ValueError, match=r"the sizes are 350M, 2\.6B"):
        config_of("3B")


def test_the_query_of_the_last_layer_is_the_position(model):
    """Without attention to tokens, the layer would add the same at equal positions; tokens enter as keys and values."""
    seen = {}
    model.model.query_layer.attention.query.register_forward_hook(lambda m, x, y: seen.update(query=x[0]))
    model.model.query_layer.register_forward_pre_hook(lambda m, x: seen.update(entry=x[0]))
    x = ids()
    outputs = model(x)
    assert outputs.logits.shape == (4, 8, 40)
    assert torch.equal(seen["query"], model.model.queries.weight[:8].expand(4, 8, 16))
    torch.testing.assert_close(seen["entry"].mean(-1), torch.zeros(4, 8), atol=1e-5, rtol=0)  # behind a layer norm


def test_no_token_sees_a_later_one(model):
    x = ids()
    other = x.clone()
    other[:, 5:] = 39 - other[:, 5:].clamp(max=38)
    torch.testing.assert_close(model(x).logits[:, :5], model(other).logits[:, :5])
    assert not torch.equal(model(x).logits[:, 5:], model(other).logits[:, 5:])


def test_generation_with_a_cache_and_padding(model):
    model.eval()
    x = ids(2, 6)
    plain = model.generate(x, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(x, max_new_tokens=6, do_sample=False), plain)
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    padded = model.generate(x, attention_mask=mask, max_new_tokens=6, do_sample=False)[0, 6:]
    assert torch.equal(padded, model.generate(x[:1, 2:], max_new_tokens=6, do_sample=False)[0, 4:])


def test_plans_do_not_change_losses(model, trains_alike):
    x = ids()
    trains_alike(model, {"input_ids": x, "labels": x})


def test_saved_models_load_through_auto_classes(model, comes_back):
    assert isinstance(comes_back(model, {"input_ids": ids()}, AutoModelForCausalLM.from_pretrained),
                      PanGuAlphaForCausalLM)  # fmt: skip
