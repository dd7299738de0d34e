"""Mixed precision: sensitivities against their definition, and choices against all others."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import tutti
from compress_models import data, logits, model, small
from tutti.compress import Mixed, Quantize, Scheme, compress, load, parse
from tutti.compress.compressor import bytes_of
from tutti.compress.mixed import Factored, Sensitivity, rest_seconds, search, seconds_of, sensitivity
from tutti.nn.linear.low_rank_linear import low_rank_layers

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
    compressed = compress(model, Mixed(5.0, SCHEMES, "rtn", ignore=()), batches)
    assert "lm_head" in {x.path for x in compressed.report.layers}
    assert sum(x.after for x in compressed.report.layers) <= 5.0 / 8 * sum(
        x.before // 4 for x in compressed.report.layers
    )
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
    compressed = compress(model, step, data())
    quantized = sum(x.after for x in compressed.report.layers)
    assert quantized <= 5.0 / 8 * sum(x.before // 4 for x in compressed.report.layers)
    assert len({x.scheme for x in compressed.report.layers}) > 1 and compressed.report.sensitivity is not None
    ranks, chosen, _ = search(model, step, data())
    assert isinstance(chosen, Quantize) and chosen.method == "rtn" and not ranks


@pytest.mark.filterwarnings("ignore:transformers cannot load")
def test_layers_may_have_lower_ranks(tmp_path):
    model, batches = small(layers=2), data()
    for x in (model.model.layers[0].mlp.up_proj, model.model.layers[1].self_attn.o_proj):
        n, k = x.weight.shape
        draw = torch.Generator().manual_seed(0)
        x.weight.data = torch.randn(n, 8, generator=draw) @ torch.randn(8, k, generator=draw) / 20
    step = Mixed(7.0, (Scheme(4, 8), Scheme(8, None)), "rtn", shares=(0.4, 0.6), multiple=8)
    compressed = compress(model, step, batches)
    ranks = low_rank_layers(compressed.model)
    assert "model.layers.0.mlp.up_proj" in ranks and "model.layers.1.self_attn.o_proj" in ranks
    table = compressed.report.sensitivity
    size = sum(x.after for x in compressed.report.layers if "rank" not in x.scheme)
    assert size <= 7.0 * sum(table.weights.values()) / 8
    path = "model.layers.0.mlp.up_proj"
    at = table.schemes.index(Factored(Scheme(8, None), 0.4))
    assert table.losses[path][at] < 0.01 * max(table.losses[path][:1])
    assert table.bytes[path][at] == sum(Scheme(8, None).bytes(x) for x in ((8, 32), (64, 8)))
    compressed.save(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(compressed.model))


def test_a_layer_without_such_a_rank_is_not_given_it():
    table = sensitivity(small(layers=1), (Scheme(8, None), Factored(Scheme(8, None), 0.5)), data(), multiple=16)
    able = {path: x[1] < float("inf") for path, x in table.losses.items()}
    assert able["model.layers.0.mlp.up_proj"] and not able["model.layers.0.self_attn.k_proj"]
    chosen, *_ = table.choose(1e6)
    assert all(able[path] for path, x in chosen.items() if isinstance(x, Factored))


def test_a_size_is_that_of_the_file(tmp_path):
    model, batches = small(layers=2), data()
    compressed = compress(model, Mixed(size=26e3, schemes=SCHEMES, method="rtn", embeddings=Scheme(8, None)), batches)
    assert 24e3 < compressed.report.after == bytes_of(compressed.model) <= 26e3
    with pytest.raises(ValueError, match=r"what is not searched takes .* quantize embeddings"):
        compress(model, Mixed(size=20e3, schemes=SCHEMES), batches)
    with pytest.raises(ValueError, match="a search has one target"):
        Mixed(bits=4.0, size=1e6)


def test_a_latency_is_that_of_the_planner_s_device():
    model, batches = small(layers=2), data()
    device = tutti.Cluster.parse("cpu:1").device
    scheme = Scheme(8, None)
    wanted = max(2 * 4096 * 1024 / device.rate("float32"), (4096 * 1024 + 4096 * 4) / device.reached)
    assert seconds_of(scheme, 4096, 1024, torch.float32, "cpu:1") == pytest.approx(wanted)
    everything = rest_seconds(model, Mixed(), ())
    table = sensitivity(model, SCHEMES, batches, cluster="cpu:1")
    fastest, slowest = (sum(f(x) for x in table.seconds.values()) for f in (min, max))
    assert fastest < slowest
    head = rest_seconds(model, Mixed(), table.losses)
    assert 0 < head < everything
    compressed = compress(model, Mixed(latency=head + (fastest + slowest) / 2, schemes=SCHEMES, method="rtn"), batches)
    taken = {x.path: [str(y) for y in SCHEMES].index(x.scheme) for x in compressed.report.layers}
    assert sum(table.seconds[path][i] for path, i in taken.items()) <= (fastest + slowest) / 2
    with pytest.raises(ValueError, match=r"the fastest schemes take .* ms for a token"):
        compress(model, Mixed(latency=head + fastest / 2, schemes=SCHEMES), batches)


def test_names():
    assert parse("mixed-8.5MB-gptq-e4").steps == (Mixed(size=8.5e6, embeddings=Scheme(4, 32)),)
    assert parse("mixed-2ms").steps[0].latency == pytest.approx(0.002)
    assert parse("mixed-2.5-lowrank0.5-lowrank0.25-hqq").steps == (Mixed(2.5, method="hqq", shares=(0.5, 0.25)),)


@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        ("mixtral", Mixed(5.0), r"experts.0.gate_proj is of experts, whose schemes are not searched"),
        ("llama", Mixed(0.5), r"the smallest schemes take .* bytes, more than the target"),
        ("llama", Mixed(latency=1e-9), r"what is not searched takes .* ms of the 1e-06 ms of the target: quantize"),
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
