"""Layers that learn while they are rounded, and models that learn from the model that they were made of."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import tutti
from compress_models import data, small
from tutti.compress import Distill, Quantize, Recipe, Scheme, compress
from tutti.compress.methods.distill import distill, loss
from tutti.compress.methods.qat import TrainedLinear, finished, rounded, trainable
from tutti.nn.quantized.quantized_linear import QuantizedLinear, quantized_layers


def tied():
    model = small(layers=2)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def lost(student, teacher, batches) -> float:
    with torch.no_grad():
        return sum(loss({"student": student, "teacher": teacher}, x).item() for x in batches) / len(batches)


@pytest.mark.parametrize("scheme", [Scheme(2, 8), Scheme(3, 16, symmetric=False), Scheme(8, None)])
def test_gradients_are_those_of_learned_step_sizes(scheme):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 16, generator=generator).requires_grad_()
    scales, zeros = scheme.grid(weight.detach())
    scales = (0.6 * scales).requires_grad_()  # some numbers are out of range
    direction = torch.randn(4, 16, generator=generator)
    fake_quantized = rounded(weight, scales, zeros, scheme)
    torch.testing.assert_close(fake_quantized.detach(), scheme.dequantize(_parts(scheme, weight, scales, zeros)))
    (fake_quantized * direction).sum().backward()
    groups = scales.shape[1]
    zero = 2 ** (scheme.bits - 1) if zeros is None else zeros.float().unsqueeze(2)
    v = weight.detach().unflatten(1, (groups, -1)) / scales.detach().unsqueeze(2)
    inside = (v + zero >= 0) & (v + zero <= 2**scheme.bits - 1)
    clamped = (v + zero).clamp(0, 2**scheme.bits - 1).round() - zero
    of_scale = torch.where(inside, clamped - v, clamped)  # equation 3 of Esser et al. 2020
    torch.testing.assert_close(
        scales.grad, (of_scale * direction.unflatten(1, (groups, -1))).sum(2), atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(weight.grad, direction * inside.flatten(1))


def _parts(scheme, weight, scales, zeros):
    from tutti.nn.quantized.scheme import Parts

    return Parts(scheme.codes(weight.detach(), scales.detach(), zeros), scales.detach(), zeros)


@pytest.mark.parametrize("method", ["rtn", "gptq", "hqq"])
def test_what_has_not_learned_is_what_it_was(method):
    model = tied()
    step = Quantize(Scheme(3, 16, symmetric=method == "gptq"), method, embeddings=Scheme(8, None))
    compressed = compress(model, step, data()).model
    before, batch = {path: x.dequantize() for path, x in quantized_layers(compressed).items()}, data()[0]
    expected = compressed(**batch).logits
    weights = {name.removesuffix(".weight"): p for name, p in model.named_parameters()}
    trainable(compressed, weights)
    assert not quantized_layers(compressed) and compressed.lm_head is compressed.model.embed_tokens.table
    torch.testing.assert_close(compressed(**batch).logits, expected, atol=1e-4, rtol=1e-4)
    finished(compressed)
    after = quantized_layers(compressed)
    assert after.keys() == before.keys() and compressed.lm_head.q is compressed.model.embed_tokens.q
    for path, x in after.items():
        torch.testing.assert_close(x.dequantize(), before[path])


def test_the_loss_is_the_divergence_of_tokens_that_are_no_padding():
    student, teacher, (batch, *_) = small(layers=1), small(layers=2), data()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:] = 0
    p, q = (F.log_softmax(x(**batch, attention_mask=mask).logits / 2, -1) for x in (teacher, student))
    counted = mask.bool()
    wanted = 4 * F.kl_div(q[counted], p[counted], log_target=True, reduction="batchmean")
    divergence = loss({"student": student, "teacher": teacher}, batch | {"attention_mask": mask}, temperature=2.0)
    torch.testing.assert_close(divergence, wanted)


def test_two_bits_learn():
    model, batches = tied(), data()
    recipe = Recipe((Quantize(Scheme(2, 16), embeddings=Scheme(4, 32)),))
    plain = compress(model, recipe, batches)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    distilled = compress(model, recipe + Recipe((Distill(steps=40, lr=2e-3),)), batches)
    assert distilled.report.after == plain.report.after and "distilled in 40 steps" in str(distilled.report)
    assert lost(distilled.model, model, batches) < 0.6 * lost(plain.model, model, batches)
    assert all(isinstance(x, QuantizedLinear) for x in quantized_layers(distilled.model).values())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("recipe", ["prune-0.5-magnitude", "prune-2:4-wanda+int3-g16-gptq"])
def test_zeros_stay_while_a_model_learns(recipe):
    distilled = compress(small(layers=1), f"{recipe}+distill-5-lr0.01", data()).model
    pruned = compress(small(layers=1), recipe.partition("+")[0], data()).model
    for part in ("mlp.down_proj", "self_attn.q_proj"):
        layer, before = (m.model.layers[0].get_submodule(part) for m in (distilled, pruned))
        weight = layer.dequantize() if isinstance(layer, QuantizedLinear) else layer.weight
        assert torch.all(weight[before.weight == 0] == 0) and not torch.equal(weight, before.weight)


def test_a_second_distillation_goes_on_where_the_first_ended():
    model, batches = tied(), data()
    recipe = Recipe((Quantize(Scheme(2, 16), embeddings=Scheme(4, 32)), Distill(steps=30, lr=2e-3)))
    once = lost(compress(model, recipe, batches).model, model, batches)
    twice = compress(model, recipe + Recipe((Distill(steps=1, lr=1e-9),)), batches).model
    assert lost(twice, model, batches) == pytest.approx(once, rel=1e-4)


def test_tied_tables_begin_with_what_they_were(monkeypatch):
    model, starts = tied(), {}

    def seen(student, weights, pruned):
        starts.update(weights)
        raise KeyboardInterrupt

    monkeypatch.setattr("tutti.compress.methods.qat.trainable", seen)
    with pytest.raises(KeyboardInterrupt):
        compress(model, Recipe((Quantize(Scheme(4, 16), embeddings=Scheme(4, 32)), Distill(1))), data())
    assert torch.equal(starts["lm_head"], model.lm_head.weight)


def test_quantized_experts_learn():
    from compress_models import model

    teacher = model("mixtral", num_hidden_layers=1)
    plain = compress(teacher, "int3-g32", data()).model
    distilled = compress(teacher, "int3-g32+distill-12-lr0.002", data()).model
    assert lost(distilled, teacher, data()) < 0.8 * lost(plain, teacher, data())
    assert isinstance(distilled.model.layers[0].mlp.experts[3].down_proj, QuantizedLinear)


def test_batches_of_other_lengths_and_without_masks():
    rows = torch.randint(2, 96, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :5] = 0
    batches = [{"input_ids": rows}, {"input_ids": rows[:, :16], "attention_mask": mask, "labels": rows[:, :16]}]
    distilled = compress(small(layers=1), "int3-g16-gptq+distill-4", batches)
    assert "distilled in 4 steps" in str(distilled.report)


def test_a_smaller_model_learns_as_plain_pytorch_does():
    teacher, student, batches = tied(), tied(), data()
    student.model.layers = student.model.layers[:1]
    plain, step = copy.deepcopy(student), Distill(steps=4, lr=1e-2)
    losses = distill(student, teacher, batches, step)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    from tutti.compress.methods.distill import rate

    for i, logged in enumerate(losses):
        optimizer.param_groups[0]["lr"] = 1e-2 * rate(i, 4)
        value = loss({"student": plain, "teacher": teacher}, batches[i % len(batches)])
        assert logged == pytest.approx(value.item(), rel=1e-4)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()


def test_what_does_not_fit_is_refused():
    model, batches = small(), data()
    other = copy.deepcopy(model)
    other.resize_token_embeddings(100)
    with pytest.raises(ValueError, match="must share a vocabulary"):
        distill(other, model, batches, Distill(1))
    with pytest.raises(ValueError, match="needs data"):
        tutti.compress(model, "int4-g32+distill-10")
    with pytest.raises(ValueError, match="float8, which is not trained"):
        compress(model, "float8+distill-1", batches)
    with pytest.raises(ValueError, match="must be positive"):
        Distill(steps=0)


@pytest.mark.parametrize("activations", ["int8", "int8-static"])
def test_inputs_are_rounded_as_they_are_served(activations):
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(4, 64, generator=draw), 3 * torch.randn(2, 5, 64, generator=draw)
    layer = QuantizedLinear(64, 4, Scheme(8, None, activations=activations))
    layer.load(weight)
    if layer.input_scale is not None:
        layer.input_scale.data.fill_(0.04)  # some inputs are out of range
    learned = TrainedLinear(layer, weight)
    torch.testing.assert_close(learned(x), layer(x), atol=1e-4, rtol=1e-4)
    x.requires_grad_()
    learned(x).sum().backward()
    scale = 0.04 if layer.input_scale is not None else x.detach().abs().amax(-1, keepdim=True) / 127
    inside = (x.detach() / scale >= -128) & (x.detach() / scale <= 127.0001)
    wanted = learned.rounded().detach().sum(0) * inside
    torch.testing.assert_close(x.grad, wanted, atol=1e-4, rtol=1e-4)
    assert bool(inside.all()) == (activations == "int8")


@pytest.mark.parametrize("recipe", ["w8a8", "int8-a8static"])
def test_what_has_learned_reports_no_error(recipe):
    distilled = compress(small(layers=1), f"{recipe}+distill-2-lr0.1", data())
    plain = quantized_layers(compress(small(layers=1), recipe, data()).model)
    for path, x in quantized_layers(distilled.model).items():
        assert x.input_scale is None or torch.equal(x.input_scale, plain[path].input_scale)
    assert all(x.error != x.error for x in distilled.report.layers) and " learned" in str(distilled.report)
    assert all(x.scheme.activations for x in quantized_layers(distilled.model).values())


def test_rounding_keeps_bias_and_dtype():
    layer = QuantizedLinear.like(torch.nn.Linear(16, 4), Scheme(4, 16))
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    layer.load(weight)
    learned = TrainedLinear(layer, weight)
    learned.bias.data += 1
    again = learned.quantized()
    torch.testing.assert_close(again.dequantize(), layer.dequantize())
    torch.testing.assert_close(again.bias, layer.bias)
