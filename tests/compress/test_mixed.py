"""Mixed precision: sensitivities against their definition, and choices against all others."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from compress_models import data, model, small

from tutti.compress import Mixed, Quantize, Scheme, compress
from tutti.compress.mixed import Sensitivity, search, sensitivity

SCHEMES = Scheme(2, 16), Scheme(4, 16), Scheme(8, None)


@pytest.fixture(scope="module")
def table() -> Sensitivity:
    return sensitivity(small(layers=2), SCHEMES, data())


def test_a_sensitivity_is_what_the_model_loses(table):
    model, batches = small(layers=2), data()
    path = "model.layers.1.mlp.up_proj"
    other = small(layers=2)
    layer = other.get_submodule(path)
    layer.weight.data = SCHEMES[0].rounded(layer.weight.data)
    with torch.no_grad():
        each = [[F.log_softmax(x(**b).logits.flatten(0, 1), -1) for b in batches] for x in (model, other)]
    wanted = sum(F.kl_div(q, p, log_target=True, reduction="sum") for p, q in zip(*each, strict=True)) / 192
    assert table.losses[path][0] == pytest.approx(wanted.item(), rel=1e-4)
    assert table.bytes[path] == tuple(x.bytes((64, 32)) for x in SCHEMES)
    assert len(table.losses) == 14 and all(x[0] > x[1] > x[2] >= 0 for x in table.losses.values())


def test_the_output_layer_is_measured_where_it_is_quantized():
    model, batches = small(layers=2), data()
    table = sensitivity(model, SCHEMES, batches, ignore=lambda path: False)
    other = small(layers=2)
    other.lm_head.weight.data = SCHEMES[0].rounded(other.lm_head.weight.data)
    with torch.no_grad():
        each = [[F.log_softmax(x(**b).logits.flatten(0, 1), -1) for b in batches] for x in (model, other)]
    wanted = sum(F.kl_div(q, p, log_target=True, reduction="sum") for p, q in zip(*each, strict=True)) / 192
    assert table.losses["lm_head"][0] == pytest.approx(wanted.item(), rel=1e-4) and len(table.losses) == 15
    made = compress(model, Mixed(5.0, SCHEMES, "rtn", ignore=()), batches)
    assert "lm_head" in {x.path for x in made.report.layers}
    assert sum(x.after for x in made.report.layers) <= 5.0 / 8 * sum(x.before // 4 for x in made.report.layers)
    model.lm_head.weight = model.model.embed_tokens.weight
    tied = compress(model, Mixed(5.0, SCHEMES, "rtn", ignore=(), embeddings=Scheme(8, None)), batches)
    assert "lm_head" not in tied.report.sensitivity.losses


@pytest.mark.parametrize("bits", [4.2, 5.5, 7.0])
def test_no_other_choice_loses_less(table, bits):
    names = list(table.losses)[:7]
    part = Sensitivity(SCHEMES, *({x: of[x] for x in names} for of in (table.losses, table.bytes, table.weights)))
    target = bits * sum(part.weights.values()) / 8
    chosen, loss, size = part.choose(target)
    every = [
        sum(part.losses[x][i] for x, i in zip(names, choice, strict=True))
        for choice in itertools.product(range(3), repeat=7)
        if sum(part.bytes[x][i] for x, i in zip(names, choice, strict=True)) <= target
    ]
    assert loss == pytest.approx(min(every)) and size <= target
    assert size == sum(part.bytes[x][SCHEMES.index(scheme)] for x, scheme in chosen.items())


def test_the_curve_falls(table, tmp_path):
    curve = table.curve(8)
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in itertools.pairwise(curve))
    table.picture(tmp_path / "curve.svg", chosen=4.5)
    assert "svg" in (tmp_path / "curve.svg").read_text()[:400]


def test_a_recipe_that_searches(tmp_path):
    model, step = small(layers=2), Mixed(5.0, SCHEMES, method="rtn")
    made = compress(model, step, data())
    quantized = sum(x.after for x in made.report.layers)
    assert quantized <= 5.0 / 8 * sum(x.before // 4 for x in made.report.layers)
    assert len({x.scheme for x in made.report.layers}) > 1 and made.report.sensitivity is not None
    found, _ = search(model, step, data())
    assert isinstance(found, Quantize) and found.method == "rtn"


@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        ("mixtral", Mixed(5.0), r"experts.0.gate_proj is of experts, whose schemes are not searched"),
        ("llama", Mixed(0.5), r"the smallest schemes take .* bytes, more than the target"),
        ("llama", Mixed(5.0, ignore=("*.down",)), r"ignore '\*.down' matches no layer"),
        ("llama", Mixed(5.0, schemes=(Scheme(2, 16), Scheme(4, 48))), "which groups of 48 do not divide"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_measured(kind, step, message, monkeypatch):
    monkeypatch.setattr("tutti.compress.mixed.sensitivity", None)
    with pytest.raises(ValueError, match=message):
        compress(model(kind), step, data())


def test_targets_and_schemes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"the smallest schemes take .* bits a weight"):
        compress(small(layers=2), Mixed(2.0, SCHEMES), data())
    with pytest.raises(ValueError, match="32 inputs, which groups of 48 do not divide"):
        compress(small(layers=2), Mixed(4.0, (Scheme(4, 48), Scheme(8, None))), data())
    with pytest.raises(ValueError, match="at least two schemes"):
        Mixed(4.0, (Scheme(4, 32),))
