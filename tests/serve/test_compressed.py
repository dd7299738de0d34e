"""Engines of folders that `tutti.compress` wrote."""

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tutti
from tutti.compress import Quantize, Recipe, Scheme
from tutti.compress.formats import gguf
from tutti.nn.quantized.quantized_linear import QuantizedLinear, dtype_of
from tutti.serve import Engine, Request, Sampling
from tutti.serve.quantize import quantized

WIDE = dict(hidden_size=64, intermediate_size=128)
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_end=True, logprobs=3)


def batches():
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 256, (2, 32), generator=draw)} for _ in range(2)]


def saved(recipe, folder, **options):
    compressed = tutti.compress(tiny.model(**{**WIDE, **options}), recipe, batches())
    compressed.save(folder)
    return compressed.model


@pytest.mark.parametrize(
    "recipe", ["int8", "int4-g32-zeros-gptq", "w8a8-smooth", "int3", "int2-g32-zeros", "int4-g128-head", "int3-g16",
               "float8", "int8-a8static", "int6-g32-zeros"]
)  # fmt: skip
@pytest.mark.starts
def test_it_is_served_as_it_is(recipe, tmp_path):
    wide = {**WIDE, "hidden_size": 128} if "g128" in recipe else WIDE
    compressed = tutti.compress(tiny.model(**wide), recipe, batches())
    compressed.save(tmp_path / "out")
    prompts = tiny.prompts(5, 19)
    engine = Engine(tmp_path / "out", blocks=32, plan="single")
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == [
        tiny.greedy(compressed.model, x, 8) for x in prompts
    ]
    assert engine.bytes == sum(x.nbytes for x in compressed.model.parameters())


@pytest.mark.filterwarnings("ignore:transformers cannot load embeddings")
@pytest.mark.parametrize("recipe", ["int8", "int4-g32-zeros", "int4-e8", "int3", "int5-g16", "float8"])
@pytest.mark.starts
def test_on_two_devices(recipe, tmp_path):
    compressed = saved(recipe, tmp_path / "out", tie_word_embeddings="e8" in recipe)
    prompts = tiny.prompts(5, 19)
    engine = Engine(tmp_path / "out", blocks=32, plan="tp2", cluster="cpu:2")
    wanted = [tiny.greedy(compressed, x, 8) for x in prompts]
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted
    shard_bytes = [
        x.nbytes for part in engine.runner.store.parts for name, x in part.items() if name.endswith("up_proj.q")
    ]
    assert (
        len(shard_bytes) == 4
        and len({*shard_bytes}) == 1
        and sum(shard_bytes[::2]) == compressed.model.layers[0].mlp.up_proj.q.nbytes
    )
    engine = Engine(compressed, blocks=32, plan="single")
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted, "and the object, too"


def test_it_is_not_quantized_twice(tmp_path):
    saved("int8", tmp_path / "out")
    with pytest.raises(ValueError, match="is quantized already"):
        Engine(tmp_path / "out", blocks=32, plan="single", quantize="int4")


def mixture(kind):
    """A small mixture with random weights."""
    sizes = dict(vocab_size=257, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                 num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
    own = {
        "mixtral": dict(num_local_experts=4),
        "qwen3_moe": dict(num_experts=8, moe_intermediate_size=64),
        "qwen2_moe": dict(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64),
        "gpt_oss": dict(num_local_experts=4, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**sizes, **WIDE, **own[kind]})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.15)
    return model


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("recipe", ["int4-g32", "int8", "float8"])
@pytest.mark.starts
def test_experts(kind, recipe, tmp_path):
    compressed = tutti.compress(mixture(kind), recipe, batches())
    compressed.save(tmp_path / "out")
    prompts = tiny.prompts(5, 19, 30)
    wanted = [tiny.greedy(compressed.model, x, 8) for x in prompts]
    engine = Engine(tmp_path / "out", blocks=64, plan="single")
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted
    assert engine.bytes == sum(x.nbytes for x in compressed.model.parameters())
    if recipe == "int4-g32":
        apart = [engine.generate([x], GREEDY)[0] for x in prompts]
        together = engine.generate(prompts, GREEDY)
        logprobs = [[[y.logprob for y in x.completions[0].logprobs] for x in some] for some in (apart, together)]
        assert logprobs[0] == logprobs[1], "the bits do not depend on the batch"
        engine = Engine(tmp_path / "out", blocks=64, plan="tp2", cluster="cpu:2")
        assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted
        parts = engine.runner.store.parts
        shard_bytes = [x.nbytes for part in parts for name, x in part.items() if name.endswith("experts.up_proj.q")]
        assert len(shard_bytes) == 4 and len({*shard_bytes}) == 1
        engine = Engine(compressed.model, blocks=64, plan="single")
        assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted, "and the object, too"


@pytest.mark.starts
def test_experts_with_biases_and_a_gate_of_their_own():
    compressed = tutti.compress(mixture("gpt_oss"), "int4-g32").model
    prompts = tiny.prompts(5, 19)
    engine = Engine(compressed, blocks=64, plan="single")
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == [tiny.greedy(compressed, x, 8) for x in prompts]


@pytest.mark.starts
def test_experts_of_several_schemes(caplog):
    step = Quantize(Scheme(bits=4, group=32), overrides=(("*.experts.1.*", Scheme(bits=8, group=None)),))
    compressed = tutti.compress(mixture("mixtral"), Recipe((step,))).model
    prompts = tiny.prompts(5, 19)
    engine = Engine(compressed, blocks=64, plan="single")
    assert [x.tokens for x in engine.generate(prompts, GREEDY)] == [tiny.greedy(compressed, x, 8) for x in prompts]
    assert "mlp.experts computes all tokens by all experts: experts have weights of several schemes" in caplog.text


@pytest.mark.parametrize("kind, tied", [("q8_0", False), ("q4_0", True), ("q6_k", False), ("f16", False)])
@pytest.mark.starts
def test_a_file_in_gguf(kind, tied, tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=256) if kind == "q6_k" else WIDE
    model, path = tiny.model(tie_word_embeddings=tied, **sizes), tmp_path / "model.gguf"
    gguf.save(model, path, kind, tokenizer=tiny.tokenizer())
    packed, widened = gguf.load(path, packed=True), gguf.load(path)
    layers = {path: x for path, x in packed.named_modules() if isinstance(x, QuantizedLinear)}
    assert any("q_proj" in path for path in layers) == (kind in gguf.PACKED)
    for name, x in layers.items():
        assert torch.equal(x.dequantize(), widened.get_submodule(name).weight)
    prompts = tiny.prompts(5, 19)
    with torch.no_grad():
        torch.testing.assert_close(*(x(torch.tensor(prompts[1:])).logits for x in (packed, widened)), rtol=0, atol=2e-4)
    engine = Engine(path, blocks=32, plan="single")
    dtype = torch.float32 if kind == "f16" else torch.bfloat16
    assert dtype_of(engine.model) == dtype
    assert engine.tokenizer("abc").input_ids == tiny.tokenizer()("abc").input_ids
    reference = gguf.load(path, dtype=dtype, packed=True)
    for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0, -1].float().log_softmax(0)
        first = output.completions[0].logprobs[0]
        assert logits[first.token] >= logits.max() - 0.1 and abs(first.logprob - logits[first.token]) < 0.1


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft
@pytest.mark.parametrize("options", [{}, dict(quantize="int4")])
@pytest.mark.starts
def test_adapters_on_quantized_layers(options, tmp_path):
    import peft

    base = tiny.model(**WIDE) if options else saved("int4-g32", tmp_path / "out")
    torch.manual_seed(0)
    tuned = peft.get_peft_model(tiny.model(**WIDE), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if "lora_" in name:
                p.normal_(0, 0.3)
    tuned.save_pretrained(tmp_path / "adapter")
    prompt = tiny.prompts(20)[0]
    engine = Engine(base if options else tmp_path / "out", blocks=32, plan="single",
                    adapters={"a": tmp_path / "adapter"}, **options)  # fmt: skip
    generated = [engine.generate([Request(prompt, GREEDY, adapter=x)])[0].tokens for x in ("", "a")]
    plain = quantized(base, "int4", True) if options else base
    assert generated[0] == tiny.greedy(plain, prompt, 8) != generated[1]
    widened = tiny.model(**WIDE)
    state = {path: x.dequantize() for path, x in plain.named_modules() if isinstance(x, QuantizedLinear)}
    widened.load_state_dict({f"{path}.weight": x for path, x in state.items()}, strict=False)
    assert generated[1] == tiny.greedy(peft.PeftModel.from_pretrained(widened, tmp_path / "adapter").merge_and_unload(),
                                       prompt, 8)  # fmt: skip


@pytest.mark.filterwarnings("ignore:transformers cannot load")
@pytest.mark.parametrize("recipe", ["lowrank-0.6-multiple32", "lowrank-0.6+int4-gptq", "ternary-g32-s8", "binary"])
@pytest.mark.starts
def test_files_that_only_we_read(recipe, tmp_path):
    compressed = saved(recipe, tmp_path / "out", hidden_size=128, intermediate_size=256)
    prompts = tiny.prompts(5, 19)
    wanted = [tiny.greedy(compressed, x, 8) for x in prompts]
    for options in (dict(plan="single"), dict(plan="tp2", cluster="cpu:2")):
        engine = Engine(tmp_path / "out", blocks=32, **options)
        assert [x.tokens for x in engine.generate(prompts, GREEDY)] == wanted
        assert engine.bytes == sum(x.nbytes for x in compressed.parameters())
