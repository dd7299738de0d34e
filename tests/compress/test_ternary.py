"""Ternary and binary weights: closed forms, gradients, files, and models that learn them."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compress_models import batches, logits, model
from tutti.compress import Distill, Quantize, Recipe, Scheme, compress, load, parse
from tutti.compress.methods.gptq import quantize
from tutti.compress.methods.qat import TrainedLinear, rounded
from tutti.nn.quantized.quantized_linear import QuantizedLinear, layout, quantized_layers
from tutti.nn.quantized.scheme import pack_ternary, unpack_ternary

TERNARY, BINARY = Scheme(2, 32, kind="ternary"), Scheme(2, 32, kind="binary")
KINDS = [TERNARY, BINARY]


def drawn(n: int = 6, k: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_the_best_scale_of_signs_is_the_mean_magnitude():
    weight = drawn()
    parts = BINARY.quantize(weight)
    groups = weight.unflatten(1, (2, 32))
    torch.testing.assert_close(parts.scales, groups.abs().mean(2))
    torch.testing.assert_close(
        BINARY.dequantize(parts), (groups.sign() * groups.abs().mean(2, keepdim=True)).flatten(1)
    )


def test_no_other_ternary_weight_is_nearer():
    scheme = Scheme(2, 6, kind="ternary")
    for seed in range(4):
        weight = drawn(1, 6, seed)
        every = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=6)))
        fitted = (every @ weight.T) / every.square().sum(1, keepdim=True).clamp(min=1)  # the best scale for these signs
        least = (weight - fitted * every).square().sum(1).min()
        torch.testing.assert_close((weight - scheme.rounded(weight)).square().sum(), least)


@pytest.mark.parametrize("scheme", KINDS, ids=str)
def test_weights_have_two_or_three_numbers(scheme):
    weight, x = drawn(8, 64), torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    x = x + 2 * x[:, :1]
    for parts in (scheme.quantize(weight), quantize(weight, scheme, x.T @ x)):
        ratio = scheme.dequantize(parts).unflatten(1, (2, 32)) / parts.scales.unsqueeze(2)
        assert set(ratio.unique().tolist()) == ({-1.0, 1.0} if scheme is BINARY else {-1.0, 0.0, 1.0})
    assert ((x @ (scheme.dequantize(parts) - weight).T).norm()) < 0.95 * (
        x @ (scheme.rounded(weight) - weight).T
    ).norm()


def test_zeros_stay_ternary():
    weight = drawn() * (drawn(seed=3) > 0)
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    assert torch.all(TERNARY.dequantize(quantize(weight, TERNARY, x.T @ x))[weight == 0] == 0)
    with pytest.raises(ValueError, match="binary weights are never 0"):
        parse("prune-0.5+binary")


@pytest.mark.parametrize("scheme", KINDS, ids=str)
def test_gradients_are_those_of_the_definition(scheme):
    """The rounding passes gradients where it does not saturate: v = w / s between -1 and 1."""
    weight, direction = drawn().requires_grad_(), drawn(seed=1)
    scales = (0.7 * scheme.grid(weight.detach())[0]).requires_grad_()
    fake_quantized = rounded(weight, scales, None, scheme)
    (fake_quantized * direction).sum().backward()
    v = (weight.detach().unflatten(1, (2, 32)) / scales.detach().unsqueeze(2)).flatten(1)
    codes = v.sign() if scheme is BINARY else v.clamp(-1, 1).round()
    torch.testing.assert_close(fake_quantized.detach(), codes * scales.detach().repeat_interleave(32, 1))
    inside = v.abs() <= 1
    torch.testing.assert_close(weight.grad, direction * inside)
    of_scale = torch.where(inside, codes - v, codes) * direction
    torch.testing.assert_close(scales.grad, of_scale.unflatten(1, (2, 32)).sum(2), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", KINDS, ids=str)
def test_what_has_not_learned_is_what_it_was(scheme):
    weight, layer = drawn(), QuantizedLinear(64, 6, scheme)
    layer.load(weight)
    assert layer.layout == "low" and layout(scheme, 64) == "low", "kernels multiply it"
    torch.testing.assert_close(layer.dequantize(), scheme.rounded(weight))
    learned = TrainedLinear(layer, weight)
    torch.testing.assert_close(learned.rounded(), layer.dequantize())
    torch.testing.assert_close(learned.quantized().dequantize(), layer.dequantize())


def test_packing_five_to_a_byte():
    codes = torch.randint(1, 4, (3, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_ternary(codes)
    assert packed.shape == (3, 7) and torch.equal(unpack_ternary(packed, 32), codes)
    assert packed[0, 0] == sum((int(x) - 1) * 3**i for i, x in enumerate(codes[0, :5]))


@pytest.mark.parametrize(
    ("recipe", "each"), [("ternary-g32", 13 / 64), ("binary-g32", 8 / 64), ("binary-g32-gptq", 1 / 8)]
)
def test_files(recipe, each, tmp_path):
    compressed = compress(model(), recipe, batches())
    with pytest.warns(UserWarning, match="transformers cannot load (ternary|binary) weights"):
        compressed.save(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for path, x in quantized_layers(compressed.model).items():
        n, k = x.shape
        packed, scales = tensors[f"{path}.weight_packed"], tensors[f"{path}.weight_scale"]
        assert packed.nbytes == pytest.approx(n * k * each, rel=0.03)
        assert packed.nbytes + scales.nbytes == x.scheme.bytes((n, k))
    again = load(tmp_path / "out")
    assert torch.equal(logits(again), logits(compressed.model))
    assert {x.scheme for x in quantized_layers(again).values()} == {parse(recipe).steps[0].scheme}
    with pytest.raises(ValueError, match="no `quant_method`"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", ["ternary", "binary"])
def test_they_learn(kind):
    teacher, data = model(num_hidden_layers=1), batches()

    def lost(student) -> float:
        p, q = (torch.log_softmax(logits(x, seed=0), -1) for x in (teacher, student))
        return float((p.exp() * (p - q)).sum(-1).mean())

    plain = compress(teacher, f"{kind}-g32", data).model
    distilled = compress(teacher, Recipe((parse(f"{kind}-g32").steps[0], Distill(30, 2e-3))), data).model
    assert lost(distilled) < 0.5 * lost(plain)
    for x in quantized_layers(distilled).values():
        assert x.scheme.kind == kind and x.parts().codes.unique().tolist() == (
            [1, 2, 3] if kind == "ternary" else [1, 3]
        )


def test_names():
    assert parse("ternary").steps == (Quantize(Scheme(2, 64, kind="ternary")),)
    assert parse("binary-g32-gptq-e4").steps == (Quantize(BINARY, "gptq", embeddings=Scheme(4, 32)),)
    assert str(TERNARY) == "ternary-g32"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse("int1"), "weights of 1 bit are called 'binary'"),
        (lambda: parse("ternary-hqq"), "hqq does not know ternary weights: use rtn, awq or gptq"),
        (lambda: parse("ternary-zeros"), "ternary has no zeros"),
        (lambda: Scheme(kind="binary"), "4 bits of kind 'binary'; expected 2 to 8 bits of integers"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
