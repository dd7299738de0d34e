"""GGUF: the numbers of its types, files that come back equal, and files that lie."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import tutti
from tutti.compress.formats import gguf, gguf_file
from tutti.compress.formats.gguf_blocks import BY_NAME
from tutti.compress.formats.gguf_tokenizer import SPLITS
from tutti.data.tokenizer import train_tokenizer, train_wordpiece
from tutti.nn.quantized.quantized_linear import quantized_layers

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
SIZES: dict[str, Any] = dict(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, eos_token_id=256, bos_token_id=None, pad_token_id=None,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts=8, moe_intermediate_size=32, num_experts_per_tok=2)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3": LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=96, norm_topk_prob=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES | {"intermediate_size": 64}, **EXPERTS, head_dim=32, norm_topk_prob=True),
}


def model_of(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


IDS = torch.arange(3, 3 + 24).reshape(1, -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_comes_back_equal(name, tmp_path):
    model = model_of(CONFIGS[name])
    gguf.save(model, tmp_path / "m.gguf", "f32")
    back = gguf.load(tmp_path / "m.gguf")
    state = back.state_dict()
    assert all(torch.equal(state[key], x) for key, x in model.state_dict().items())
    assert torch.equal(logits(back, IDS), logits(model, IDS))


ERRORS = {"f32": 0, "f16": 5e-4, "bf16": 4e-3, "q8_0": 4e-3, "q6_k": 0.016, "q5_k": 0.034, "q4_1": 0.068, "q4_k": 0.068,
          "q4_0": 0.08, "q3_k": 0.16, "q2_k": 0.36}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_numbers_are_rounded_to_the_nearest_that_the_reference_reads(name):
    kind, x = BY_NAME[name], np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    x[0] = 0
    data = kind.encode(x)
    decoded = kind.decode(data)
    assert data.shape == (6, 512 // kind.block * kind.size)
    assert not decoded[0].any()
    assert np.abs(decoded - x).max() <= 3 * ERRORS[name] * np.abs(x).max() / 2
    again = kind.decode(kind.encode(decoded))
    assert np.square(again - decoded).mean() <= np.square(decoded - x).mean() / 4  # nearly a fixed point
    quants = pytest.importorskip("gguf.quants")
    types = pytest.importorskip("gguf").GGMLQuantizationType
    assert np.allclose(decoded, quants.dequantize(data, types[name.upper()]), rtol=1e-6, atol=1e-7)


def test_numbers_that_do_not_fit_are_refused():
    x = np.full((1, 32), 1e9, np.float32)
    with pytest.raises(ValueError, match="too large for float16: choose bf16 or f32"):
        BY_NAME["f16"].encode(x)
    with pytest.raises(ValueError, match="not finite"):
        BY_NAME["q8_0"].encode(x * np.inf)
    with pytest.raises(ValueError, match="a scale is too large"):
        BY_NAME["q4_0"].encode(x)
    with pytest.raises(ValueError, match="multiple of 32"):
        BY_NAME["q4_0"].encode(x[:, :31])


def test_the_reference_reader_finds_the_same_content(tmp_path):
    reference = pytest.importorskip("gguf")
    from gguf.quants import dequantize

    model = model_of(CONFIGS["llama"])
    gguf.save(model, tmp_path / "m.gguf", "q4_0", tokenizer=bytes_tokenizer())
    theirs = reference.GGUFReader(tmp_path / "m.gguf")
    ours = gguf_file.read(tmp_path / "m.gguf")
    assert ours.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert {x.name for x in theirs.tensors} == set(ours.tensors)
    for x in theirs.tensors:
        own = ours.tensors[x.name]
        assert tuple(x.shape)[::-1] == own.shape and x.tensor_type == own.type.number
        assert np.array_equal(dequantize(x.data, x.tensor_type).reshape(own.shape), own.numbers())
    for key, value in ours.metadata.items():
        contents = theirs.fields[key].contents()
        assert contents == pytest.approx(value.tolist() if isinstance(value, np.ndarray) else value)
    assert set(ours.metadata) == {x for x in theirs.fields if not x.startswith("GGUF.")}


def bytes_tokenizer() -> Any:
    """A tokenizer of 257 tokens."""
    return train_tokenizer([], 257)


def tokenizer_of(kind: str) -> Any:
    """A tokenizer of 290 tokens with a splitter of `SPLITS`."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = train_tokenizer(["def f(x): return x12345 + 'it''s'\n\n  h\u00e9\u00e9 \u65e5\u672c " * 3], 290)
    if pattern := SPLITS[kind]:
        split, letters = pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False)
        letters.use_regex = False
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    return tokenizer


TEXT = "def g(y):\n    return y + 98765  # it's \u65e5\u672c\u00e9\n\n"


@pytest.mark.parametrize("kind", SPLITS)
def test_a_tokenizer_comes_back(kind, tmp_path):
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = TEMPLATE
    gguf.save(model_of(CONFIGS["llama"]), tmp_path / "m.gguf", tokenizer=tokenizer)
    back = gguf.load_tokenizer(tmp_path / "m.gguf")
    text = TEXT + "<|endoftext|>"
    assert back(text).input_ids == tokenizer(text).input_ids
    assert back.decode(back(text).input_ids) == text
    assert (back.chat_template, back.eos_token) == (TEMPLATE, tokenizer.eos_token)


def test_tokenizers_that_llama_cpp_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"WordPiece.*pass tokenizer=None"):
        gguf.save(model_of(CONFIGS["llama"]), tmp_path / "m", tokenizer=train_wordpiece(["a few words"], 50))
    gguf.save(model_of(CONFIGS["llama"]), tmp_path / "m")
    with pytest.raises(ValueError, match="pass a tokenizer of your own"):
        gguf.load_tokenizer(tmp_path / "m")


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        (MistralConfig(**SIZES, sliding_window=16), "f16", "set max_position_embeddings to at most 16"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "f16", "with silu, not with gelu"),
        (LlamaConfig(**SIZES), "q9", "GGUF type 'q9'; expected one of f32"),
        (LlamaConfig(**SIZES), "q4_k", "q_proj.weight has rows of 64 numbers, and q4_k has blocks of 256"),
    ],
)
def test_models_that_do_not_fit_are_refused(config, kind, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        gguf.save(model_of(config), tmp_path / "m.gguf", kind)
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_family_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(ValueError, match=r"supports models of llama.*not gpt2"):
        gguf.save(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), tmp_path / "m.gguf")


RECIPES = {"int8": "q8_0", "int4-g32": "q4_0", "int4-g64-zeros": "q4_1", "int3-g32": "q4_0", "int2-g32-zeros": "q4_1"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compressed_model_keeps_its_numbers(recipe, tmp_path):
    compressed = tutti.compress(model_of(LlamaConfig(**SIZES | {"intermediate_size": 128})), f"{recipe}-e8").model
    gguf.save(compressed, tmp_path / "m.gguf")
    file = gguf_file.read(tmp_path / "m.gguf")
    assert file.tensors["blk.0.attn_k.weight"].type.name == RECIPES[recipe]
    assert file.tensors["token_embd.weight"].type.name == "q8_0"
    state = gguf.load(tmp_path / "m.gguf").state_dict()
    for path, layer in quantized_layers(compressed).items():
        weight = layer.dequantize()
        torch.testing.assert_close(state[f"{path}.weight"], weight, rtol=0, atol=2e-3 * float(weight.abs().max()))


def test_quantized_weights_that_do_not_fit_are_refused(tmp_path):
    model = model_of(LlamaConfig(**SIZES))
    for recipe, message in ("int4-g16", "layers.0.*groups of 16 along 64"), ("int6-g32", "not int6.*: dequantize it"):
        with pytest.raises(ValueError, match=message):
            gguf.save(tutti.compress(model, recipe).model, tmp_path / "m.gguf")


# ---- files that lie -------------------------------------------------------------------------------------------------


def text(x: str) -> bytes:
    return struct.pack("<Q", len(x)) + x.encode()


def tensor(name: str = "a", sizes: tuple = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file_of(entries: list[bytes], tensors: list[bytes], data: int = 256, counts: tuple | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(entries)))) + b"".join(entries + tensors)
    return head + b"\0" * (-len(head) % 32 + data)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


HUGE = 2**60
LIES = {
    "no content": (b"", "the magic number needs 4 bytes"),
    "another format": (b"PK\3\4" + b"\0" * 60, "begins with b'PK"),
    "version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
    "other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "no counts": (b"GGUF\3\0\0\0", "the number of tensors needs 8 bytes"),
    "tensors": (file_of([], [], counts=(HUGE, 0)), f"{HUGE} tensors cannot be"),
    "entries": (file_of([], [], counts=(0, HUGE)), f"{HUGE} metadata entries cannot be"),
    "key": (file_of([struct.pack("<QIQ", HUGE, 0, 0)], []), "the length of a key is"),
    "not UTF-8": (file_of([entry("k", 8, struct.pack("<Q", 2) + b"\xff\xff")], []), "k is not UTF-8"),
    "text": (file_of([entry("k", 8, struct.pack("<Q", HUGE))], []), "the length of k is"),
    "array": (file_of([entry("k", 9, struct.pack("<IQ", 12, HUGE))], []), "the length of k is"),
    "array of texts": (file_of([entry("k", 9, struct.pack("<IQ", 8, HUGE))], []), "the length of k is"),
    "nested arrays": (file_of([entry("k", 9, struct.pack("<IQ", 9, 1))], []), "an array of arrays"),
    "type of an entry": (file_of([entry("k", 77, b"\0" * 8)], []), "k has type 77"),
    "an entry twice": (file_of([entry("k", 0, b"\1")] * 2, []), "it has k twice"),
    "alignment 0": (file_of([entry("general.alignment", 4, struct.pack("<I", 0))], []), "expected a power of 2"),
    "alignment 24": (file_of([entry("general.alignment", 4, struct.pack("<I", 24))], []), "expected a power of 2"),
    "alignment text": (file_of([entry("general.alignment", 8, text("x"))], []), "expected a power of 2"),
    "large alignment": (file_of([entry("general.alignment", 10, struct.pack("<Q", 2**62))], [tensor()]), "the tensors"),
    "dims": (file_of([], [text("a") + struct.pack("<IQQQ", HUGE >> 32, 1, 1, 1)]), "dims; expected 1 to 4"),
    "no dims": (file_of([], [text("a" * 9) + struct.pack("<IIQQ", 0, 0, 0, 0)]), "a has 0 dims"),
    "a size of 0": (file_of([], [tensor(sizes=(32, 0))]), "a size of 0"),
    "sizes": (file_of([], [tensor(sizes=(HUGE, HUGE))]), "and the tensors have 256"),
    "type": (file_of([], [tensor(kind=99)]), "type 99, which is not known; known are f32"),
    "blocks": (file_of([], [tensor(sizes=(33,), kind=8)]), "rows of 33, which q8_0 cannot hold"),
    "an offset": (file_of([], [tensor(offset=HUGE)]), "and the tensors have 256"),
    "unaligned": (file_of([], [tensor(offset=8)]), "at 8, which is not a multiple of the alignment 32"),
    "overlap": (file_of([], [tensor(), tensor("b", offset=64)]), "b at 64 overlaps a, which ends at 128"),
    "a tensor twice": (file_of([], [tensor(), tensor(offset=128)]), "the tensor a twice"),
    "truncated": (file_of([], [tensor()])[:-140], "a needs 128 bytes at 0, and the tensors have 116"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused_at_once(lie, tmp_path):
    data, message = LIES[lie]
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as error:
            gguf_file.read(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "m.gguf is not a valid GGUF file" in str(error.value)


def test_a_file_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"none.gguf cannot be read: No such file"):
        gguf.load(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": 2**31 - 1}, "block_count is 2147483647, and the file has 2 layers"),
        ({"llama.feed_forward_length": 2**30}, r"ffn_down.weight has shape \(64, 96\); expected \(64, 1073741824\)"),
        ({"llama.attention.head_count": 0}, "head_count is 0; expected a number of more than 0"),
        ({"llama.attention.head_count": "many"}, "head_count is 'many'"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'; expected 'linear'"),
        ({"general.architecture": "mamba"}, "'mamba'; expected one of"),
        ({"tokenizer.ggml.bos_token_id": "first"}, "bos_token_id is 'first'; expected one of 300 tokens"),
        ({"tokenizer.ggml.padding_token_id": 300}, "padding_token_id is 300; expected one of 300 tokens"),
    ],
)
def test_metadata_that_contradict_the_tensors_are_refused(change, message, tmp_path):
    gguf.save(model_of(CONFIGS["llama"]), tmp_path / "m.gguf", "f32")
    rewrite(tmp_path / "m.gguf", change)
    with pytest.raises(ValueError, match=message):
        gguf.load(tmp_path / "m.gguf")


def rewrite(path: Any, change: dict[str, Any], without: str = "") -> None:
    file = gguf_file.read(path)
    tensors = [gguf_file.Written(name, x.type, x.shape, lambda x=x: x.data)
               for name, x in file.tensors.items() if name != without]  # fmt: skip
    gguf_file.write(path, {**file.metadata, **change}, tensors)


def test_a_tensor_that_is_missing_is_named(tmp_path):
    gguf.save(model_of(CONFIGS["qwen2"]), tmp_path / "m.gguf", "q8_0")
    rewrite(tmp_path / "m.gguf", {}, without="blk.1.attn_k.bias")
    with pytest.raises(ValueError, match=r"blk.1.attn_k.bias has shape None; expected \(32,\)"):
        gguf.load(tmp_path / "m.gguf")


def test_damaged_heads_are_refused_or_read(tmp_path):
    gguf.save(model_of(CONFIGS["llama"]), tmp_path / "m.gguf", "q4_0", tokenizer=bytes_tokenizer())
    good = (tmp_path / "m.gguf").read_bytes()
    draw, refused = np.random.default_rng(0), 0
    head = good.index(b"blk.1.ffn_down") + 64
    for _ in range(300):
        bad = bytearray(good)
        for at in draw.integers(0, head, 3):
            bad[at] = draw.integers(256)
        (tmp_path / "bad.gguf").write_bytes(bad)
        try:
            gguf._config(gguf_file.read(tmp_path / "bad.gguf"))
        except ValueError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("name, recipe", [("mixtral", "int4-g32"), ("qwen2_moe", "int4-g32"), ("qwen3_moe", "int8")])
def test_a_compressed_mixture_comes_back(name, recipe, tmp_path):
    compressed = tutti.compress(model_of(CONFIGS[name]), recipe).model
    gguf.save(compressed, tmp_path / "m.gguf", "f32")
    tensors = gguf_file.read(tmp_path / "m.gguf").tensors
    assert {x.type.name for key, x in tensors.items() if "_exps" in key} == {"q8_0" if recipe == "int8" else "q4_0"}
    wanted = logits(compressed, IDS)
    for packed in False, True:
        back = logits(gguf.load(tmp_path / "m.gguf", packed=packed), IDS)
        errors = (back - wanted)[0].norm(dim=1) / wanted[0].norm(dim=1)  # of scales in float16
        assert errors.median() < 2e-3, errors


def test_mixtures_that_llama_cpp_computes_otherwise_are_refused(tmp_path):
    for options, message in (
        (dict(norm_topk_prob=False), "with norm_topk_prob=True"),
        (dict(mlp_only_layers=[0]), "no layers without experts"),
    ):
        config = Qwen3MoeConfig(**SIZES, **EXPERTS, **{"norm_topk_prob": True, **options})
        with pytest.raises(ValueError, match=message):
            gguf.save(model_of(config), tmp_path / "m.gguf")


# ---- llama.cpp ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0", "q4_1"])
def test_llama_cpp_computes_the_same_logits(name, kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    gguf.save(model_of(CONFIGS[name]), tmp_path / "m.gguf", kind, embeddings="f32" if kind == "f32" else None)
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    theirs.eval(IDS[0].tolist())
    scores = torch.from_numpy(theirs.scores[: IDS.shape[1]].copy())
    ours = logits(gguf.load(tmp_path / "m.gguf"), IDS)[0]
    theirs.close()
    errors = (scores - ours).norm(dim=1) / ours.norm(dim=1)  # llama.cpp rounds inputs: tokens may go to other experts
    assert errors.max() < 1e-3 if kind == "f32" else errors.median() < 0.03, errors


@pytest.mark.parametrize("kind", SPLITS)
def test_llama_cpp_tokenizes_alike(kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = tokenizer_of(kind)
    gguf.save(model_of(CONFIGS["llama"]), tmp_path / "m.gguf", tokenizer=tokenizer)
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, n_threads=1, vocab_only=True, verbose=False)
    ids = theirs.tokenize(TEXT.encode() + b"<|endoftext|>", special=True, add_bos=False)
    assert ids == tokenizer(TEXT + "<|endoftext|>").input_ids
    assert theirs.detokenize(ids, special=True).decode() == TEXT + "<|endoftext|>"
    theirs.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_llama_cpp_computes_a_compressed_model(recipe, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    compressed = tutti.compress(model_of(LlamaConfig(**SIZES | {"intermediate_size": 128})), recipe).model
    gguf.save(compressed, tmp_path / "m.gguf", "f32")
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    theirs.eval(IDS[0].tolist())
    scores, ours = torch.from_numpy(theirs.scores[: IDS.shape[1]].copy()), logits(compressed, IDS)[0]
    theirs.close()
    assert (scores - ours).norm() / ours.norm() < 0.03
