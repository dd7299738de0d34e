"""The verb: recipes over whole models."""

import copy

import pytest
import torch
from torch import nn

import compress_models as small
import tutti
from tutti.compress import Quantize, Recipe, Rotate, Scheme, parse
from tutti.compress.blocks import Walk, stack_of
from tutti.compress.experts import ExpertLayers
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding
from tutti.nn.quantized.quantized_linear import QuantizedLinear, quantized_layers

RECIPES = ["int4", "int8", "float8", "w8a8", "int4-g32-zeros-gptq", "int4-awq", "w8a8-smooth", "int8-a8static-smooth",
           "int3-g32-hqq", "rotate+int4-gptq", "int4-gptq-head-e8"]  # fmt: skip


def error(actual, wanted):
    return float((actual - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe):
    model = small.llama()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    compressed = tutti.compress(model, recipe, small.batches())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items()), "the model is not changed"
    layers = quantized_layers(compressed.model)
    assert len(layers) == (15 if "head" in recipe else 14)
    assert {x.path for x in compressed.report.layers if x.path in layers} == set(layers)
    bound = 0.03 if recipe == "int8" else 0.15 if "8" in recipe.split("-")[0] else 0.8
    assert error(small.logits(compressed.model), small.logits(model)) < bound
    assert (
        compressed.report.after < compressed.report.before / 1.9
        and str(compressed.report).count("\n") == len(compressed.report.layers) + 1
    )
    assert compressed.model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_a_recipe_is_deterministic():
    one, two = (tutti.compress(small.llama(), "rotate+int4-gptq", small.batches()) for _ in range(2))
    assert torch.equal(small.logits(one.model), small.logits(two.model))


def test_better_methods_have_smaller_errors():
    """Errors of the outputs of layers on the calibration data; RTN is measured there, too, by an overridden method."""

    def errors(method):
        compressed = tutti.compress(small.llama(), Quantize(Scheme(3, 32), method), small.batches(8))
        return {x.path: x.error for x in compressed.report.layers if ".0." in x.path}

    nearest = errors("smooth")  # rounds to the nearest
    for method in ("gptq", "awq"):
        assert sum(errors(method).values()) < 0.97 * sum(nearest.values())


def test_overrides_and_ignored_layers():
    step = Quantize(Scheme(4, 64), ignore=("lm_head", "*.1.mlp.*"),
                    overrides=(("*.v_proj", None), ("down_proj", Scheme(8, None))))  # fmt: skip
    layers = tutti.compress(small.llama(), step).model.model.layers
    assert str(layers[0].mlp.down_proj.scheme) == "int8" and str(layers[0].mlp.up_proj.scheme) == "int4-g64"
    assert type(layers[1].mlp.down_proj) is nn.Linear and type(layers[0].self_attn.v_proj) is nn.Linear


# -- exactness before rounding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "mixtral", "qwen3-moe", "gpt-oss"])
def test_a_rotation_leaves_the_logits_as_they_are(kind):
    model = small.model(kind)
    rotated_model = tutti.compress(model, Recipe((Rotate(untie=True),))).model
    torch.testing.assert_close(small.logits(rotated_model), small.logits(model), rtol=1e-4, atol=1e-4)
    embeddings = [x.get_input_embeddings().weight for x in (model, rotated_model)]
    assert not torch.allclose(*embeddings) and torch.allclose(embeddings[0].norm(dim=1), embeddings[1].norm(dim=1))


def test_a_width_that_is_no_power_of_two_is_rotated():
    model = small.model(hidden_size=48, head_dim=12)
    rotated_model = tutti.compress(model, "rotate").model
    torch.testing.assert_close(small.logits(rotated_model), small.logits(model), rtol=1e-4, atol=1e-4)


def test_a_rotation_spreads_outliers():
    model = small.model()
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[7] = 40
    rotated_model = tutti.compress(model, Recipe((Rotate(),))).model
    weights = [x.model.layers[0].self_attn.q_proj.weight.detach() for x in (model, rotated_model)]
    ranges = [float(x.abs().max() / x.std()) for x in weights]
    assert ranges[1] < ranges[0]
    plain, rotated = (tutti.compress(model, x, small.batches()) for x in ("w8a8", "rotate+w8a8"))
    wanted = small.logits(model)
    assert error(small.logits(rotated.model), wanted) < error(small.logits(plain.model), wanted)


@pytest.mark.parametrize("kind", ["opt", "gemma"])
def test_what_cannot_be_rotated(kind):
    with pytest.raises(ValueError, match=r"cannot be rotated|tied to the embeddings.*rotate-untie"):
        tutti.compress(small.model(kind), Recipe((Rotate(untie=kind == "opt"),)))


@pytest.mark.parametrize("recipe", ["rotate+int4", "shrink-channels0.5+rotate+int4", "rotate+mixed-4"])
def test_a_rotation_of_a_tied_output_layer_is_refused_before_anything_is_computed(recipe):
    def progress(done, total, path):
        raise AssertionError(path)

    with pytest.raises(ValueError, match=r"tied to the embeddings.*rotate-untie"):
        tutti.compress(small.model(tie_word_embeddings=True), recipe, small.batches(), progress=progress)


@pytest.mark.parametrize("kind", ["llama", "gemma", "mixtral", "qwen3-moe", "opt"])
@pytest.mark.parametrize("method", ["awq", "smooth"])
def test_folds_change_no_output_and_are_found(kind, method, monkeypatch):
    """With schemes that round nothing, only the folds are left."""
    monkeypatch.setattr(Scheme, "rounded", lambda self, w: w.float() * (1 + 0.1 * torch.rand(w.shape[1])))
    applied: list[tuple[bool, bool]] = []
    monkeypatch.setattr("tutti.compress.compressor.Compression._layers", lambda self, path, layer, statistics: None)
    fold = tutti.compress.folds.Fold
    apply = fold.apply
    monkeypatch.setattr(
        fold, "apply", lambda self, *args: applied.append((apply(self, *args), self.is_norm)) or applied[-1][0]
    )
    model = small.model(kind)
    compressed = tutti.compress(model, Quantize(Scheme(8, None), method), small.batches()).model
    torch.testing.assert_close(small.logits(compressed), small.logits(model), rtol=1e-3, atol=1e-3)
    assert all(good for good, _ in applied) and sum(norm for _, norm in applied) >= (3 if kind == "opt" else 4)
    if kind in ("llama", "gemma"):
        assert len(applied) == 8, "v_proj to o_proj, and up_proj to down_proj, too"


# -- data -------------------------------------------------------------------------------------------------------------


def test_statistics_are_of_the_inputs_without_padding():
    model, data = copy.deepcopy(small.llama()), small.batches(2)
    padded = []
    for batch in data:
        ids, mask = batch["input_ids"], torch.ones(2, 30, dtype=torch.int64)
        mask[:, :6] = 0
        padded.append({"input_ids": torch.cat([torch.full((2, 6), 7), ids], 1), "attention_mask": mask})
    statistics = []
    for batches in (data, padded):
        walk = Walk(model, stack_of(model)[1], batches)
        walk.begin()
        walk.run(0, outputs=True)
        statistics.append(
            walk.statistics(1, {"q": model.model.layers[1].self_attn.q_proj, "d": model.model.layers[1].mlp.down_proj})
        )
    for name in ("q", "d"):
        assert statistics[0][name].count == statistics[1][name].count == 96
        torch.testing.assert_close(statistics[0][name].gram, statistics[1][name].gram, rtol=1e-3, atol=1e-3)


def test_statistics_are_those_of_a_hook():
    model, data = small.llama(), small.batches(2)
    seen = []
    layer = model.model.layers[0].mlp.up_proj
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    walk = Walk(model, stack_of(model)[1], data)
    walk.begin()
    seen.clear()
    layers = {name: getattr(model.model.layers[0].mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}
    statistics = walk.statistics(0, layers)
    handle.remove()
    x = torch.cat(seen)
    torch.testing.assert_close(statistics["up_proj"].gram, x.T @ x, rtol=1e-4, atol=1e-3)
    assert statistics["up_proj"] is statistics["gate_proj"] and statistics["down_proj"].k == 128, (
        "layers with one input share theirs"
    )


def test_a_walk_gives_the_inputs_of_compressed_blocks():
    """The moments of the second block are those of the first one's quantized outputs."""
    compressed = tutti.compress(small.llama(), "int4-gptq", small.batches()).model
    walk = Walk(compressed, stack_of(compressed)[1], small.batches())
    walk.begin()
    walk.run(0, outputs=True)
    seen = []
    handle = compressed.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in small.batches():
            compressed(**batch)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(walk.hidden, seen, strict=True))


def test_texts_are_tokenized():
    def tokenizer(text):
        return {"input_ids": [ord(x) % 96 for x in text]}

    compressed = tutti.compress(
        small.llama(), "int4-gptq", ["some text of a file " * 40, "and another"], tokenizer=tokenizer
    )
    assert compressed.report.layers[0].tokens == 512


# -- mixtures of experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_experts_are_layers(kind):
    model = small.model(kind)
    for at, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        expert_layers = ExpertLayers(experts)
        x = torch.randn(9, 64)
        index = torch.randint(0, expert_layers.count, (9, 2))
        weights = torch.rand(9, 2)
        torch.testing.assert_close(expert_layers(x, index, weights), experts(x, index, weights), rtol=1e-4, atol=1e-4)
        assert at < 2
    compressed = tutti.compress(model, "int8", small.batches())
    assert error(small.logits(compressed.model), small.logits(model)) < 0.1
    assert sum(isinstance(x, ExpertLayers) for x in compressed.model.modules()) == 2


def test_experts_that_no_token_reaches_are_rounded_to_nearest():
    model = small.model("qwen3-moe")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[3] = 0
        model.model.layers[0].mlp.gate.weight[3, 0] = -1e6
        model.model.embed_tokens.weight[:, 0] = 5  # the first channel is large: expert 3 is the last one
        model.model.layers[0].input_layernorm.weight[0] = model.model.layers[0].post_attention_layernorm.weight[0] = 1
    compressed = tutti.compress(model, "int4-gptq", small.batches())
    reports = {x.path: x for x in compressed.report.layers if ".0.mlp.experts.3." in x.path}
    assert len(reports) == 3
    for path, report in reports.items():
        assert report.tokens == 0 and "no token reached it" in report.note and 0 < report.error < 1
        stem = path.rpartition(".")[2]
        fused = model.model.layers[0].mlp.experts
        half = fused.gate_up_proj[3].chunk(2)
        weight = {"gate_proj": half[0], "up_proj": half[1], "down_proj": fused.down_proj[3]}[stem]
        assert torch.equal(compressed.model.get_submodule(path).dequantize(), Scheme(4, 64).rounded(weight.detach()))
    assert all(bool(x.isfinite().all()) for x in compressed.model.state_dict().values() if x.is_floating_point())
    assert any(x.tokens and ".experts." in x.path for x in compressed.report.layers)


def test_moments_of_experts_are_held_one_at_a_time(monkeypatch):
    """At most those of the layers outside of experts, of one expert and of its last layer."""
    import tutti.compress.compressor as module

    alive, most = [0], [0]

    class Counted(module.Statistics):
        def __post_init__(self):
            super().__post_init__()
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self):
            alive[0] -= 1

    monkeypatch.setattr(module, "Statistics", Counted)
    tutti.compress(small.model("qwen3-moe"), "int4-gptq", small.batches())
    assert most[0] <= 2


# -- embeddings -------------------------------------------------------------------------------------------------------


def test_tied_embeddings_are_quantized_once():
    model = small.model(tie_word_embeddings=True)
    compressed = tutti.compress(model, "int4-e8")
    table, head = compressed.model.get_input_embeddings(), compressed.model.get_output_embeddings()
    assert isinstance(table, QuantizedEmbedding) and isinstance(head, QuantizedLinear) and table.q is head.q
    assert [x.path for x in compressed.report.layers].count("model.embed_tokens") == 1
    assert "lm_head" not in [x.path for x in compressed.report.layers]
    plain = tutti.compress(model, "int4").model
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    with pytest.raises(ValueError, match="lm_head is tied to the embeddings: quantize both"):
        tutti.compress(model, "int4-head")


@pytest.mark.parametrize("recipe", ["rotate-untie+int8-e8-head", "rotate-untie+int8-head"])
def test_an_output_layer_that_is_untied_is_quantized(recipe):
    model = small.model(tie_word_embeddings=True)
    compressed = tutti.compress(model, recipe).model
    assert (
        isinstance(compressed.lm_head, QuantizedLinear) and error(small.logits(compressed), small.logits(model)) < 0.05
    )


def test_embeddings_that_are_scaled():
    model = small.model("gemma")
    compressed = tutti.compress(model, "int8-e8").model
    assert error(small.logits(compressed), small.logits(model)) < 0.05


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Quantize(Scheme(4, 48)), r"q_proj has 64 inputs, which groups of 48 do not divide: use groups of 64"),
        (Quantize(ignore=("lm_heat",)), r"ignore 'lm_heat' matches no layer; the layers are model.layers.\*.self_attn"),
        (Quantize(layers=("*.qkv",)), "layers .* matches no layer"),
        (Quantize(overrides=(("*.experts", None),)), "overrides .* matches no layer"),
        (Quantize(ignore=("*",)), "ignores all layers"),
        ("int4-gptq", "needs data: calibration="),
        (Quantize(embeddings=Scheme(4, 48)), "the embedding has 64 inputs"),
    ],
)
def test_recipes_that_do_not_fit(recipe, message):
    with pytest.raises(ValueError, match=message):
        tutti.compress(small.llama(), recipe)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "has 0 tokens"),
        (small.batches(1, 1, 8), "has 8 tokens; a layer has 128 inputs: give at least 32"),
        ([{"input_ids": torch.ones(4, 64, dtype=torch.int64), "attention_mask": torch.zeros(4, 64)}], "has 0 tokens"),
        ([{"tokens": torch.ones(4, 64)}], "batch 0 .* has no input_ids"),
        ([{"input_ids": [1, 2]}], "has no input_ids"),
        (["text"], "needs a tokenizer"),
    ],
)
def test_data_that_is_too_short(data, message):
    with pytest.raises(ValueError, match=message):
        tutti.compress(small.llama(), "int4-gptq", data)


def test_models_that_do_not_fit():
    with pytest.raises(ValueError, match="has no linear layers"):
        tutti.compress(small.model("gpt2"), "int4")
    once = tutti.compress(small.llama(), "int4")
    with pytest.raises(ValueError, match="is quantized already"):
        tutti.compress(once.model, "int8")
    with pytest.raises(ValueError, match=r"no single list of blocks.*use rtn or hqq"):
        tutti.compress(small.model("t5"), "int4-gptq", small.batches())
    twice = small.model()
    twice.model.layers[1] = twice.model.layers[0]
    for recipe in ("int4", "prune-0.5", "shrink-heads0.5", "distill-1"):
        with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj and model.layers.1.\S+ are one layer"):
            tutti.compress(twice, recipe, small.batches())
    with pytest.raises(ValueError, match=r"experts that data may not reach"):
        tutti.compress(small.model("mixtral"), "int8-a8static", small.batches())
    compressed = tutti.compress(small.model("t5"), "int8").model
    assert len(quantized_layers(compressed)) > 20
    with pytest.raises(ValueError, match=r"out= is for a folder"):
        tutti.compress(small.llama(), "int4", out="folder")


def test_layers_that_are_served_slowly_are_told():
    notes = {r: {x.note for x in tutti.compress(small.llama(), r).report.layers} for r in ("int4", "int3", "int4-g16")}
    assert notes == {"int4": {""}, "int3": {""}, "int4-g16": {"dequantized at each call, which is slower"}}


def test_steps_in_python_are_those_of_names():
    one, two = (tutti.compress(small.llama(), x).report.layers for x in (parse("int3-g16"), Quantize(Scheme(3, 16))))
    assert one == two
