"""Pruning of single weights against definitions, and that zeros stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compress_models import data, small
from tutti.compress import Prune, Scheme, compress
from tutti.compress.methods import gptq
from tutti.compress.methods.sparsity import prune

METHODS = "magnitude", "wanda", "sparsegpt"


def drawn(n: int = 16, k: int = 32, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (n, k), and inputs (tokens, k) that depend on one another."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.eye(k) + 0.125 * torch.randn(k, k, generator=generator)
    return torch.randn(n, k, generator=generator), torch.randn(tokens, k, generator=generator) @ mixed


def error(x: torch.Tensor, weight: torch.Tensor, pruned: torch.Tensor) -> float:
    return float((x @ (weight - pruned).T).norm() / (x @ weight.T).norm())


@pytest.mark.parametrize("pattern", ["", "2:4", "1:2"])
@pytest.mark.parametrize("method", METHODS)
def test_as_many_weights_are_zero_as_are_asked_for(method, pattern):
    weight, x = drawn()
    pruned = prune(weight, Prune(0.5, pattern, method), x.T @ x)
    assert ((pruned == 0).sum(1) == 16).all()
    if pattern:
        width = int(pattern[2:])
        assert ((pruned.unflatten(1, (-1, width)) == 0).sum(2) == width // 2).all()
    if method != "sparsegpt":
        assert torch.equal(pruned[pruned != 0], weight[pruned != 0])


def test_wanda_is_exact_where_inputs_do_not_depend_on_one_another():
    weight, _ = drawn()
    energy = torch.rand(32, generator=torch.Generator().manual_seed(1)) + 0.01
    pruned = prune(weight, Prune(0.25, method="wanda"), torch.diag(energy))
    cost = weight.square() * energy
    least = cost.sort(1).values[:, :8].sum(1)  # no other choice of 8 weights costs less
    torch.testing.assert_close((cost * (pruned == 0)).sum(1), least)


def naive(weight: torch.Tensor, gram: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
    """Weights that stay, fitted again column by column, by definition: H is inverted anew for the columns to come."""
    work, k = weight.double().clone(), weight.shape[1]
    damped = gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(k)
    for j in range(k):
        inverse = torch.linalg.inv(damped[j:, j:])
        lost = torch.where(gone[:, j], work[:, j], 0.0)
        work[:, j:] -= lost.unsqueeze(1) * inverse[0] / inverse[0, 0]
    return work


def test_sparsegpt_fits_as_its_definition_says():
    weight, x = drawn()
    gram = x.T @ x
    pruned = prune(weight, Prune(0.5), gram)
    torch.testing.assert_close(
        pruned.double(), naive(weight, gram, pruned == 0).masked_fill(pruned == 0, 0), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("pattern", ["", "2:4"])
def test_each_method_loses_less_than_the_one_before(pattern):
    weight, x = drawn(64, 256, 4000)
    lost = [error(x, weight, prune(weight, Prune(0.5, pattern, method), x.T @ x)) for method in METHODS]
    assert lost[2] < lost[1] < 1.01 * lost[0]


def test_zeros_stay_when_they_are_quantized():
    weight, x = drawn(16, 64, 800)
    pruned, scheme = prune(weight, Prune(0.5, "2:4"), x.T @ x), Scheme(4, 32)
    dequantized = scheme.dequantize(gptq.quantize(pruned, scheme, x.T @ x))
    assert bool((dequantized[pruned == 0] == 0).all())
    assert error(x, weight, dequantized) < 1.2 * error(x, weight, pruned)


def test_a_model_and_the_layer_behind_its_blocks():
    model = small()
    before = copy.deepcopy(model.state_dict())
    pruned = compress(model, Prune(0.5, "2:4", "wanda", ignore=("*.v_proj",)), data())
    zeros = {
        path: float((x.weight == 0).float().mean()) for path, x in pruned.model.named_modules() if type(x) is nn.Linear
    }
    assert all(abs(share - (0 if "v_proj" in path else 0.5)) < 0.01 for path, share in zeros.items())
    assert "lm_head" in zeros and "50.0 % of the weights" in str(pruned.report)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        ("llama", Prune(pattern="1:3"), "has 32 inputs, which pattern '1:3' does not divide"),
        ("llama", Prune(ignore=("*.nothing",)), "matches no layer"),
        ("llama", Prune(ignore=("*",)), "ignores all layers"),
        ("mixtral", Prune(), "experts such as .* are not pruned"),
    ],
)
def test_what_does_not_fit_is_refused(kind, step, message):
    with pytest.raises(ValueError, match=message):
        compress(small(kind), step, data())


def test_patterns_and_shares_that_mean_nothing():
    for options, message in (({"pattern": "4:2"}, "expected such as 2:4"), ({"sparsity": 1.0}, "expected 0 to 1")):
        with pytest.raises(ValueError, match=message):
            Prune(**options)
