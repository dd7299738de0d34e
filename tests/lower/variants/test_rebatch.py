"""A captured step for fewer rows is the one that capture gives for them."""

import pytest
import torch
import transformers
from torch import nn

import models
import tutti
from tutti.lower.variants.rebatch import rebatched
from tutti.tracing.batch import Batch


def gpt2() -> models.Case:
    """With dropout."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    config.loss_type = "ForCausalLM"
    ids = models.integers(8, 12, below=64)
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}, None


def convolutions() -> models.Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    return model, (torch.randn(8, 3, 8, 8),), lambda model, batch: model(batch[0]).square().mean()


def mixture(implementation: str = "batched_mm") -> models.Case:
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    ids = models.integers(8, 12, below=64)
    return model, {"input_ids": ids, "labels": ids}, None


def dropless() -> models.Case:
    """With the fused operator of the experts, whose weights keep all experts."""
    return mixture("grouped_mm")


def part(batch: Batch, parts: int) -> Batch:
    if isinstance(batch, dict):
        return {key: x[: len(x) // parts] for key, x in batch.items()}
    return tuple(x[: len(x) // parts] for x in batch)


@pytest.mark.parametrize("make", [gpt2, convolutions, mixture, dropless])
def test_as_captured(make):
    model, batch, loss = make()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = tutti.capture(model, batch, optimizer, loss)
    smaller, captured = rebatched(whole, 4), tutti.capture(model, part(batch, 4), optimizer, loss)
    shapes = [(str(n.target), n.meta.get("label"), n.meta.get("val"), n.meta.get("flops")) for n in smaller.graph.nodes]
    assert shapes == [
        (str(n.target), n.meta.get("label"), n.meta.get("val"), n.meta.get("flops")) for n in captured.graph.nodes
    ]
    assert list(smaller.outputs) == list(captured.outputs)
    if make in (mixture, dropless):  # elsewhere the divisor of a mean, or the strides of random numbers, differ
        assert smaller.fingerprint == captured.fingerprint


def test_rows_that_do_not_divide_are_refused():
    model, batch, loss = convolutions()
    whole = tutti.capture(model, batch, torch.optim.SGD(model.parameters()), loss)
    with pytest.raises(ValueError, match="do not divide into 3 parts"):
        rebatched(whole, 3)


def test_rows_that_are_looked_up_are_refused():
    def loss(model, batch):
        return (model(batch[0]) * batch[0][torch.arange(8)]).mean()

    model = nn.Linear(8, 8)
    whole = tutti.capture(model, (torch.randn(8, 8),), torch.optim.SGD(model.parameters()), loss)
    with pytest.raises(ValueError, match="rows"):
        rebatched(whole, 4)
