"""GGUF, the format of llama.cpp: `save` a causal language model of transformers, and `load` one.

Supported are models of the families of Llama (Mistral and Mixtral among them), Qwen 2 and Qwen 3, dense or mixtures of
experts, whose weights a file has in tensors of three dims. A file has the weights, the
config and, if it is byte-level BPE, the tokenizer. Weights are stored in one of the types of `gguf_blocks`; norms and
biases are float32. A quantized layer keeps its numbers: int8 becomes q8_0, and 4 bits or fewer become q4_0 without
zeros or q4_1 with zeros, exact up to the rounding of its scales to float16.

llama.cpp turns neighbours (2 i, 2 i + 1) of a head of Llama where transformers turns (i, i + d / 2), so that the rows
of q and k are permuted there; Qwen's are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.compress.experts import ExpertLayers, is_experts
from tutti.compress.formats import compressed_tensors, gguf_file, gguf_tokenizer
from tutti.compress.formats.gguf_blocks import BY_NAME, BlockType, q4_0, q4_1, q8_0
from tutti.compress.formats.gguf_file import File, Written
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import Parts, Scheme

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mixtral": "llama",
            "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}  # fmt: skip
"""The architecture of llama.cpp for a model type of transformers."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MODELS = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}  # model types of transformers, where the names differ
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_ROUTER, _SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp_shexp"  # of float32; the second without its dim of size one
_LAYER_OF = {own: name for name, own in _LAYER.items()}
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q2_k": 10, "q3_k": 12, "q4_k": 15, "q5_k": 17,
               "q6_k": 18, "bf16": 32}  # fmt: skip
BLOCK = 32  # numbers that share a scale in GGUF
PACKED = "q8_0", "q4_0"
QUANTIZED = QuantizedLinear, QuantizedEmbedding
_PLAIN = "f32", "f16", "bf16"
_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


# ---- saving ---------------------------------------------------------------------------------------------------------


def save(
    model: Any, path: str | Path, kind: str = "f16", *, embeddings: str | None = None, tokenizer: Any = None
) -> None:
    """Write a causal language model of transformers to a GGUF file, which is complete or absent.

    Args:
        model: Model of a family of `FAMILIES`. Its quantized layers keep their numbers.
        path: The file.
        kind: Type of the weights of linear layers: a name of `gguf_blocks.BY_NAME`.
        embeddings: Type of the embeddings and the output layer. Default: `kind`, or q8_0 if that has fewer bits.
        tokenizer: A `PreTrainedTokenizerFast` to write into the file.

    Raises:
        ValueError: for models, tokenizers and types that the format cannot express; it says why.
    """
    if embeddings is None:
        embeddings = kind if kind in (*_PLAIN, "q8_0") else "q8_0"
    for name in kind, embeddings:
        if name not in BY_NAME:
            raise ValueError(f"GGUF type {name!r}; expected one of {', '.join(BY_NAME)}")
    config = model.config
    metadata = _metadata(config, kind)
    if tokenizer is None:
        metadata["tokenizer.ggml.model"] = "none"  # llama.cpp needs an entry
    else:
        metadata |= gguf_tokenizer.to_metadata(tokenizer, config.vocab_size)
    tensors = [
        _described(model, own, name, config, BY_NAME[embeddings if name.split(".")[0] in _TOP else kind])
        for own, name in _names(model).items()
    ]
    tensors += _experts(model, BY_NAME[kind])
    if (factors := _rope_factors(config)) is not None:
        tensors.append(Written(_FREQUENCIES, BY_NAME["f32"], factors.shape, lambda: factors.view(np.uint8)[None]))
    gguf_file.write(Path(path), metadata, tensors)


def check(model: Any, tokenizer: Any) -> None:
    """Raise ValueError for a model or a tokenizer that the format cannot express."""
    _metadata(model.config, "f16")
    gguf_tokenizer.to_metadata(tokenizer, model.config.vocab_size)
    _names(model)


def _names(model: Any) -> dict[str, str]:
    """The names of the tensors of a model in the file; of quantized layers, that of the weight."""
    names = {}
    quantized = {path: x for path, x in model.named_modules() if isinstance(x, QUANTIZED)}
    tied = model.config.tie_word_embeddings
    for own in [*model.state_dict(), *(f"{path}.weight" for path in quantized)]:
        path, _, kind = own.rpartition(".")
        if (
            (path in quantized and kind not in ("weight", "bias"))
            or (tied and path == "lm_head")
            or (".mlp.experts." in own)
        ):
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
        name = f"blk.{match[1]}.{_LAYER_OF.get(match[2])}" if match else {y: x for x, y in _TOP.items()}.get(path)
        if name is None or name.endswith("None") or kind not in ("weight", "bias"):
            raise ValueError(f"GGUF export does not know the tensor {own} of a {type(model).__name__}")
        names[own] = f"{name}.{kind}"
    return names


def _described(model: Any, own: str, name: str, config: Any, kind: BlockType) -> Written:
    """A tensor of a model to write."""
    path, _, part = own.rpartition(".")
    layer = model.get_submodule(path)
    heads = _permuted_heads(config, name)
    if name.split(".")[2:] == [_SHARED_GATE, "weight"]:
        gate = layer.dequantize() if isinstance(layer, QuantizedLinear) else layer.weight
        numbers = gate.detach().float().cpu().numpy()
        return Written(name, BY_NAME["f32"], numbers.shape[1:], lambda: BY_NAME["f32"].encode(numbers))
    if name.split(".")[2:] == [_ROUTER, "weight"]:
        kind = BY_NAME["f32"]
    if part == "weight" and isinstance(layer, QUANTIZED):
        kind, make = _of_parts(layer, path)
        return Written(name, kind, tuple(layer.weight.shape), lambda: _permute(make(), heads))
    x: Tensor = getattr(layer, part).detach()
    if x.ndim == 1:
        kind = BY_NAME["f32"]
    elif x.shape[-1] % kind.block:
        raise ValueError(
            f"{own} has rows of {x.shape[-1]} numbers, and {kind.name} has blocks of {kind.block}: choose a type with "
            "smaller blocks, such as q8_0 (32) or f16"
        )

    def rows() -> np.ndarray:
        x = getattr(layer, part).detach()
        array = x.float().cpu().numpy().reshape(x.shape if x.ndim > 1 else (1, -1))
        if x.ndim == 1:
            return kind.encode(np.ascontiguousarray(_permute(array.T, heads).T))
        try:
            return _permute(kind.encode(array), heads)
        except ValueError as error:
            raise ValueError(f"{own}: {error}") from None

    return Written(name, kind, tuple(x.shape), rows)


def _experts(model: Any, kind: BlockType) -> list[Written]:
    """The weights of experts to write, (experts, n, k), those of a layer and name together."""
    tensors = []
    for path, module in model.named_modules():
        if not isinstance(module, ExpertLayers) and not is_experts(module):
            continue
        of = module if isinstance(module, ExpertLayers) else ExpertLayers(module)
        for own, name in _EXPERTS.items():
            layers = {f"{path}.{i}.{own}": getattr(of[i], own) for i in range(of.count)}
            tensors.append(_stacked(f"blk.{path.split('.')[2]}.{name}.weight", layers, kind))
    return tensors


def _stacked(name: str, layers: dict[str, Any], kind: BlockType) -> Written:
    """One tensor of the layers of several experts, by path."""
    parts: list[Callable[[], np.ndarray]] = []
    kinds = set()
    for path, x in layers.items():
        if isinstance(x, QuantizedLinear):
            own, rows = _of_parts(x, path)
            kinds.add(own)
            parts.append(rows)
        else:
            kinds.add(kind)
            parts.append(lambda x=x: kind.encode(x.weight.detach().float().cpu().numpy()))
        if x.bias is not None:
            raise ValueError(f"{path}: GGUF export has no biases of experts")
    (n, k), of_all = next(iter(layers.values())).weight.shape, kinds.pop()
    if kinds:
        raise ValueError(f"{name}: experts of a layer have one type in GGUF, not several")
    if k % of_all.block:
        raise ValueError(f"{name} has rows of {k} numbers, and {of_all.name} has blocks of {of_all.block}: choose a "
                         "type with smaller blocks, such as q8_0 (32) or f16")  # fmt: skip
    return Written(name, of_all, (len(parts), n, k), lambda: np.concatenate([make() for make in parts]))


def _of_parts(layer: QuantizedLinear | QuantizedEmbedding, path: str) -> tuple[BlockType, Callable[[], np.ndarray]]:
    """The type of a quantized weight (n, k), and a function that makes its bytes (n, bytes of a row)."""
    scheme, k = layer.scheme, layer.weight.shape[1]
    each = scheme.group or k
    if scheme.kind != "int" or (scheme.bits > 4 and (scheme.bits != 8 or not scheme.symmetric)):
        raise ValueError(
            f"{path}: GGUF export keeps int8 without zeros and 4 bits or fewer, not {scheme}: dequantize it"
        )
    if each % BLOCK or k % BLOCK:
        raise ValueError(f"{path}: groups of {each} along {k} numbers are not made of GGUF's blocks of {BLOCK}")
    kind = BY_NAME["q8_0" if scheme.bits == 8 else "q4_0" if scheme.symmetric else "q4_1"]

    def rows() -> np.ndarray:
        parts = layer.parts()
        codes = parts.codes.cpu().numpy().astype(np.int16).reshape(-1, BLOCK)
        scales = np.repeat(parts.scales.cpu().numpy(), each // BLOCK, 1).reshape(-1)
        try:
            if scheme.bits == 8:
                packed_rows = q8_0(codes - 128, scales)
            elif parts.zeros is None:
                packed_rows = q4_0(codes - 2 ** (scheme.bits - 1) + 8, scales)
            else:
                zeros = np.repeat(parts.zeros.cpu().numpy(), each // BLOCK, 1).reshape(-1)
                packed_rows = q4_1(codes, scales, -scales * zeros)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return packed_rows.reshape(len(parts.codes), -1)

    return kind, rows


def _permuted_heads(config: Any, name: str) -> int | None:
    """The heads whose rows are permuted in a tensor."""
    if FAMILIES[config.model_type] != "llama" or not (match := re.search(r"\.attn_([qk])\.", name)):
        return None
    return config.num_attention_heads if match[1] == "q" else config.num_key_value_heads


def _permute(rows: np.ndarray, heads: int | None, back: bool = False) -> np.ndarray:
    """Rows (heads * d, ...) from halves of a head to neighbours, or back."""
    if heads is None:
        return rows
    each = len(rows) // heads // 2
    parts = rows.reshape(heads, *((each, 2) if back else (2, each)), -1)
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(rows.shape)


def _metadata(config: Any, kind: str) -> dict[str, Any]:
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"GGUF export supports models of {', '.join(FAMILIES)}, not {config.model_type}")
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", "linear", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"GGUF export supports rotary embeddings of default, linear and llama3, not {rope}")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        raise ValueError(
            f"llama.cpp has no window of attention for {family}: sliding_window is {window} of "
            f"{config.max_position_embeddings} positions; set max_position_embeddings to at most {window}"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"llama.cpp computes {family} with silu, not with {config.hidden_act}")
    if getattr(config, "attention_bias", False) and family.startswith("qwen3"):
        raise ValueError("llama.cpp has no biases in the attention of qwen3")
    head = _head_dim(config)
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    own |= _metadata_of_experts(config)
    if rope["rope_type"] == "linear":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "llama3":
        own |= {f"rope.llama3.{name}": rope[name] for name in _LLAMA3}
    return {
        "general.architecture": family,
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        **{f"{family}.{name}": value for name, value in own.items()},
    }


def _metadata_of_experts(config: Any) -> dict[str, int]:
    kind = config.model_type
    if kind == "mixtral":
        return {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if kind not in _MODELS.values():
        return {}
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ValueError(f"llama.cpp has no layers without experts in {kind}")
    if config.norm_topk_prob != (kind == "qwen3_moe"):
        raise ValueError(f"llama.cpp computes {kind} with norm_topk_prob={not config.norm_topk_prob}")
    metadata = {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
                "expert_feed_forward_length": config.moe_intermediate_size}  # fmt: skip
    if kind == "qwen2_moe":
        metadata["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return metadata


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope_factors(config: Any) -> np.ndarray | None:
    """By what llama3 divides the frequencies of a head (d / 2), as `transformers` does; None for other kinds."""
    rope = config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    d, longest = _head_dim(config), rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, d, 2) / d)
    smooth = ((longest / waves - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


# ---- loading --------------------------------------------------------------------------------------------------------


def load(path: str | Path, dtype: torch.dtype | None = torch.float32, packed: bool = False) -> Any:
    """The transformers model of a GGUF file.

    dtype: dtype of its weights. None: bfloat16, or float32 if all weights of the file are of float32 or float16.
    packed: whether layers and embeddings of q8_0 and q4_0 keep their numbers, as quantized ones; other types are
    widened.

    Raises ValueError, naming the file, if it is damaged, or is of a family or type that is not supported.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.initialization import no_init_weights

    file = gguf_file.read(Path(path))
    if dtype is None:
        exact = all(x.type.name in ("f32", "f16") for x in file.tensors.values())
        dtype = torch.float32 if exact else torch.bfloat16
    config, state = read(path, dtype, packed, file)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not packed:
        return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()
    with no_init_weights():
        model = kind._from_config(config, dtype=dtype)
    model.tie_weights()
    schemes = {own.removesuffix(".weight"): x.scheme for own, x in state.items() if isinstance(x, QuantizedLinear)}
    if config.tie_word_embeddings and (own := _TOP["token_embd"]) in schemes:
        schemes = {_TOP["output"]: schemes[own], **schemes}
    compressed_tensors.prepare(model, schemes)
    with torch.no_grad():
        for own, x in state.items():
            path_of, _, name = own.rpartition(".")
            module = model.get_submodule(path_of)
            if isinstance(x, QuantizedLinear):
                (module.table() if isinstance(module, QuantizedEmbedding) else module).load_parts(x.parts())
            else:
                getattr(module, name).copy_(x)
    return model.eval()


def load_tokenizer(path: str | Path) -> Any:
    """The `PreTrainedTokenizerFast` of a GGUF file. Raises ValueError if it has none that is supported."""
    return gguf_tokenizer.from_metadata(gguf_file.read(Path(path)).metadata)


def read(
    path: str | Path, dtype: torch.dtype = torch.float32, packed: bool = False, file: File | None = None
) -> tuple[Any, dict[str, Any]]:
    """The transformers config and state dict of a GGUF file. packed: whether weights of q8_0 and q4_0 are
    `QuantizedLinear`. file: its content, if that is known. Errors as of `load`."""
    file = gguf_file.read(Path(path)) if file is None else file
    try:
        config = _config(file)
        names = _expected(config, file)
        tensors: dict[str, Any] = {}
        for own, name in names.items():
            tensors[own] = (packed and _packed(file, name, config, dtype)) or _tensor(file, name, config).to(dtype)
        for own in [x for x in tensors if x.endswith(".experts.gate_proj")]:
            stem = own.removesuffix("gate_proj")
            tensors[f"{stem}gate_up_proj"] = torch.cat([tensors.pop(own), tensors.pop(f"{stem}up_proj")], 1)
        return config, tensors
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _config(file: File) -> Any:
    """The config of a file, whose sizes agree with its tensors."""
    from transformers import AutoConfig

    families, family = sorted({*FAMILIES.values()}), str(file.metadata.get("general.architecture"))
    if family not in families:
        raise ValueError(f"general.architecture is {family!r}; expected one of {', '.join(families)}")

    def number(name: str, default: float | None = None, kind: type = int, most: int = 2**31) -> Any:
        value = file.metadata.get(f"{family}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value < most:
            raise ValueError(f"{family}.{name} is {value!r}; expected a number of more than 0 and less than {most}")
        return value

    def token(name: str) -> int | None:
        id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if id is not None and (type(id) is not int or not 0 <= id < vocab):
            raise ValueError(f"tokenizer.ggml.{name}_token_id is {id!r}; expected one of {vocab} tokens")
        return id

    layers = {x.split(".")[1] for x in file.tensors if x.startswith("blk.")}
    if number("block_count") != len(layers):
        raise ValueError(f"{family}.block_count is {number('block_count')}, and the file has {len(layers)} layers")
    if "token_embd.weight" not in file.tensors:
        raise ValueError("it has no token_embd.weight")
    vocab = file.tensors["token_embd.weight"].shape[0]
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head = number("attention.key_length", hidden // heads)
    if number("attention.value_length", head) != head or number("rope.dimension_count", head) != head or head % 2:
        raise ValueError(f"heads of {head} for keys, and others for values or positions, are not supported")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number("rope.freq_base", 10000.0, float)}
    scaling = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": number("rope.scaling.factor", None, float)}
    elif scaling != "none":
        raise ValueError(f"{family}.rope.scaling.type is {scaling!r}; expected 'linear' or 'none'")
    biases = any(x.endswith("attn_q.bias") for x in file.tensors)
    sizes = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        num_key_value_heads=number("attention.head_count_kv", heads),
        head_dim=head,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon", None, float),
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=token("bos"),
        eos_token_id=token("eos"),
        pad_token_id=token("padding"),
    )
    kind = _MODELS.get(family, family)
    if experts := number("expert_count") if f"{family}.expert_count" in file.metadata else 0:
        kind = "mixtral" if family == "llama" else kind
        sizes["num_experts_per_tok"] = number("expert_used_count", most=experts + 1)
        sizes["num_local_experts" if kind == "mixtral" else "num_experts"] = experts
    if family in _MODELS:
        sizes["moe_intermediate_size"] = number("expert_feed_forward_length")
        sizes["norm_topk_prob"] = family == "qwen3moe"
    if family == "qwen2moe":
        sizes["shared_expert_intermediate_size"] = number("expert_shared_feed_forward_length")
        sizes["qkv_bias"] = biases
    if kind == "llama":
        sizes |= dict(attention_bias=biases, mlp_bias=any(x.endswith("ffn_up.bias") for x in file.tensors))
    if _FREQUENCIES in file.tensors:
        frequencies = file.tensors[_FREQUENCIES].numbers()
        of_llama3 = {name: number(f"rope.llama3.{name}", default, float) for name, default in _LLAMA3.items()}
        sizes["rope_parameters"] = {**rope, "rope_type": "llama3", "factor": float(frequencies.max()), **of_llama3}
    if kind == "mixtral" and biases:
        raise ValueError("a mixture of the family of Llama with biases in its attention is not supported")
    config = AutoConfig.for_model(kind, **sizes)
    if _FREQUENCIES in file.tensors:
        factors = _rope_factors(config)
        if factors is None or factors.shape != frequencies.shape or not np.allclose(factors, frequencies, rtol=1e-3):
            raise ValueError(f"{_FREQUENCIES} is not the scaling of Llama 3; other scalings are not supported")
    return config


def _expected(config: Any, file: File) -> dict[str, str]:
    """Names in the file by names of the state dict. All tensors are there, no others, and have the right shapes."""
    d, hidden, wide = _head_dim(config), config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    family, vocab = config.model_type, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,), "attn_q.weight": (q, hidden), "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden), "attn_output.weight": (hidden, q), "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (wide, hidden), "ffn_up.weight": (wide, hidden), "ffn_down.weight": (hidden, wide),
    }  # fmt: skip
    if count := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        each = wide if family == "mixtral" else config.moe_intermediate_size
        for name in "ffn_gate", "ffn_up", "ffn_down":
            del shapes[f"{name}.weight"]
            down = name == "ffn_down"
            shapes[f"{name}_exps.weight"] = (count, hidden, each) if down else (count, each, hidden)
            if family == "qwen2_moe":
                shared = config.shared_expert_intermediate_size
                shapes[f"{name}_shexp.weight"] = (hidden, shared) if down else (shared, hidden)
        shapes[f"{_ROUTER}.weight"] = count, hidden
        if family == "qwen2_moe":
            shapes[f"{_SHARED_GATE}.weight"] = (hidden,)
    with_bias = []
    if family == "qwen2" or getattr(config, "qkv_bias", False) or getattr(config, "attention_bias", False):
        with_bias += ["attn_q", "attn_k", "attn_v"]
    if getattr(config, "attention_bias", False):
        with_bias += ["attn_output"]
    if getattr(config, "mlp_bias", False):
        with_bias += ["ffn_gate", "ffn_up", "ffn_down"]
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in with_bias}
    if family.startswith("qwen3"):
        shapes |= {"attn_q_norm.weight": (d,), "attn_k_norm.weight": (d,)}
    expected = {f"blk.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in shapes.items()}
    expected |= {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        expected["output.weight"] = (vocab, hidden)
    present = {name: x.shape for name, x in file.tensors.items() if name != _FREQUENCIES}
    for name in sorted({*expected, *present}):
        if expected.get(name) != present.get(name):
            raise ValueError(f"{name} has shape {present.get(name)}; expected {expected.get(name)} (None: absent)")
    return {_own_name(name): name for name in expected}


def _own_name(name: str) -> str:
    path, _, kind = name.rpartition(".")
    if path in _TOP:
        return f"{_TOP[path]}.{kind}"
    _, layer, inside = path.split(".")
    if inside in _EXPERTS.values():
        return f"model.layers.{layer}.mlp.experts.{next(own for own, x in _EXPERTS.items() if x == inside)}"
    return f"model.layers.{layer}.{_LAYER[inside]}.{kind}"


def _tensor(file: File, name: str, config: Any) -> Tensor:
    rows = _permute(file.tensors[name].numbers(), _permuted_heads(config, name), back=True)
    if f".{_SHARED_GATE}." in name:
        rows = rows[None]
    return torch.from_numpy(rows)


def _packed(file: File, name: str, config: Any, dtype: torch.dtype) -> QuantizedLinear | None:
    """A weight that can stay as it is, as a layer; None for others."""
    stored = file.tensors[name]
    if stored.type.name not in PACKED or len(stored.shape) != 2:
        return None
    bits = 8 if stored.type.name == "q8_0" else 4
    rows = _permute(stored.data, _permuted_heads(config, name), back=True)
    blocks = np.ascontiguousarray(rows).reshape(-1, stored.type.size)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32).reshape(len(rows), -1)
    if bits == 8:
        codes = (blocks[:, 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    else:
        codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
    parts = Parts(torch.from_numpy(codes.reshape(len(rows), -1)), torch.from_numpy(scales))
    return QuantizedLinear.from_parts(parts, Scheme(bits=bits, group=BLOCK), dtype=dtype)
