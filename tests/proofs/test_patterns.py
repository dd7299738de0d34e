"""Every norm, activation, rotary embedding and loss of well-known models becomes one operator, and no number changes.

How many there are is counted from the modules that the eager model calls.
"""

import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.modules import activation as torch_activations
from torch.nn.modules import module as module_hooks

import models
import tutti
from cases import crossed
from tutti.exec.kernels.codegen import generate
from tutti.tracing.rewrite.fused import fused, left_over
from tutti.tracing.rewrite.pattern_table import PATTERNS

MODELS = ("llama", "qwen3", "gpt2", "bert", "t5", "vit")
DTYPES = (torch.float32, torch.bfloat16)


def called(model: nn.Module, batch) -> Counter[str]:
    """Norms and activations by the names of the modules that are called, two rotary embeddings for each attention of a
    model that has them, one loss."""
    counts: Counter[str] = Counter()

    def count(module, args):
        kind = type(module)
        if "Norm" in kind.__name__:
            counts["norm"] += 1
        elif kind.__module__ == "transformers.activations" or hasattr(torch_activations, kind.__name__):
            counts["activation"] += 1
        elif kind.__name__.endswith("Attention") and hasattr(sys.modules[kind.__module__], "apply_rotary_pos_emb"):
            counts["rotary"] += 2

    handle = module_hooks.register_module_forward_pre_hook(count)
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        handle.remove()
    counts["loss"] += 1
    return counts


def case(name: str, dtype: torch.dtype):
    model, batch, _ = models.case(name)
    return model.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def run(graph: tutti.StepGraph, model: nn.Module, batch) -> dict[str, torch.Tensor]:
    """Loss and gradients, operator by operator."""
    inputs = {f"param:{k}": p.detach() for k, p in model.named_parameters()}
    inputs |= {f"buffer:{k}": b.clone() for k, b in model.named_buffers()} | {f"batch:{k}": x for k, x in batch.items()}
    inputs |= {"step": torch.tensor(1), "seed": torch.tensor(0), **graph.constants}
    with pytest.raises(StopIteration) as stop:
        next(generate(graph.graph)(*(inputs[name] for name in graph.inputs)))
    return dict(zip(graph.outputs, stop.value.value, strict=True))


@pytest.mark.parametrize("name, dtype", crossed(MODELS, DTYPES))
def test_all_are_found(name, dtype):
    model, batch = case(name, dtype)
    graph, expected = tutti.capture(model, batch), called(model, batch)
    counts = {family: sum(matches.values()) for family, matches in fused(graph).items()}
    assert {family: counts.get(family, 0) for family in expected} == expected
    assert {family for family, _, _ in left_over(graph)} <= {"softmax"}, "attention that SDPA writes out"


@pytest.mark.parametrize("name, dtype", crossed(MODELS, DTYPES[::-1]))
def test_the_numbers_are_the_same(name, dtype):
    """To float32's rounding, and in bfloat16 to its own: a fused loss or GELU rounds less often."""
    model, batch = case(name, dtype)
    ours, plain = (run(tutti.capture(model, batch, patterns=p), model, batch) for p in (PATTERNS, ()))
    digits = 2e-6 if dtype == torch.float32 else 4e-2
    largest = max(x.abs().max().item() for k, x in plain.items() if k != "loss")
    for key, value in plain.items():
        scale = max(value.abs().max().item(), 1e-3 * largest)  # biases of keys have gradients of rounding alone
        torch.testing.assert_close(ours[key], value, rtol=digits, atol=digits * scale, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_but_the_loss_changes_no_bit(name, dtype):
    """Up to where the loss begins: of a model whose head is scored otherwise."""
    model, batch = case(name, dtype)

    def score(model, batch):
        return model(input_ids=batch["input_ids"]).logits.float().square().mean()

    ours, plain = (
        run(tutti.capture(model, batch, loss=score, patterns=p), model, {"input_ids": batch["input_ids"], **batch})
        for p in (PATTERNS, ())
    )
    assert ours.keys() == plain.keys() and all(torch.equal(ours[key], plain[key]) for key in plain)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_under_autocast(name):
    """Casts are operators of their own, between those that are replaced."""
    model, batch = case(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        graph, plain = (tutti.capture(model, batch, patterns=p) for p in (PATTERNS, ()))
    assert graph.matches == tutti.capture(model, batch).matches
    if name == "bert":
        return  # as written it does not run so on a CPU either: norms get gradients of another dtype
    ours, expected = (run(g, model, batch)["loss"].item() for g in (graph, plain))
    assert ours == pytest.approx(expected, rel=2e-3)


def test_a_frozen_model_and_one_that_is_only_evaluated():
    model, batch = case("llama", torch.float32)
    assert tutti.capture(model, batch, gradients=False).matches == tutti.capture(model, batch).matches
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    frozen = tutti.capture(model, batch)
    assert frozen.matches == {"RMS norm": 5, "rotary embedding": 4, "gated unit": 2, "linear and cross-entropy": 1}
    backward = {str(n.target) for n in frozen.calls if "backward" in str(n.target)}
    assert backward == {"tutti.linear_logsumexp_backward.default"}
