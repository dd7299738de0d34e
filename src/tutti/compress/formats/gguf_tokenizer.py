"""Byte-level BPE tokenizers in the metadata of GGUF.

llama.cpp knows how a text is split before the merges by a name, `tokenizer.ggml.pre`; `SPLITS` has the patterns of the
names that are supported. Other tokenizers, SentencePiece among them, raise ValueError.
"""

from __future__ import annotations

import json
from typing import Any

CONTROL, NORMAL, USER_DEFINED, UNUSED = 3, 1, 4, 5  # kinds of tokens

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, str | None] = {"gpt-2": None, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""Patterns by name; None: that of `tokenizers.pre_tokenizers.ByteLevel` itself."""


def to_metadata(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """The metadata of a `PreTrainedTokenizerFast`.

    Tokens that the model has beyond the tokenizer's are marked unused. Raises ValueError for tokenizers that are not
    byte-level BPE with one of `SPLITS`, and for more tokens than `vocab_size`.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    own, pre = described["model"], _split_of(described["pre_tokenizer"])
    normalizer = described["normalizer"]
    if (
        own["type"] != "BPE"
        or pre is None
        or own.get("byte_fallback")
        or (normalizer or {"type": "NFC"})["type"] != "NFC"
    ):
        raise ValueError(
            "GGUF export supports byte-level BPE tokenizers that split as GPT-2, Llama 3 or Qwen 2 do; this one is "
            f"{own['type']} with the splitter {described['pre_tokenizer']}: pass tokenizer=None to leave it out"
        )
    added = {x["id"]: x for x in described["added_tokens"]}
    names = {i: name for name, i in own["vocab"].items()} | {i: x["content"] for i, x in added.items()}
    if max(names) >= vocab_size:
        raise ValueError(f"the tokenizer has the token {max(names)}, and the model only {vocab_size}")
    kinds = [
        (CONTROL if added[i]["special"] else USER_DEFINED) if i in added else NORMAL if i in names else UNUSED
        for i in range(vocab_size)
    ]
    import numpy as np

    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [names.get(i, f"[PAD{i}]") for i in range(vocab_size)],
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    }
    if merges := [x if isinstance(x, str) else " ".join(x) for x in own["merges"]]:
        metadata["tokenizer.ggml.merges"] = merges
    for name in "bos", "eos", "unk", "pad":
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            metadata[f"tokenizer.ggml.{_LONG.get(name, name)}_token_id"] = token
    ids = tokenizer("a").input_ids
    metadata["tokenizer.ggml.add_bos_token"] = len(ids) > 1 and ids[0] == tokenizer.bos_token_id
    metadata["tokenizer.ggml.add_eos_token"] = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    if isinstance(tokenizer.chat_template, str):
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


_LONG = {"unk": "unknown", "pad": "padding"}


def _split_of(described: dict[str, Any] | None) -> str | None:
    """The name of a splitter, if it is known."""
    parts = (described or {}).get("pretokenizers", [described])
    if any(x is None or x.get("add_prefix_space") for x in parts) or parts[-1]["type"] != "ByteLevel":
        return None
    pattern = parts[0]["pattern"].get("Regex") if len(parts) == 2 and parts[0]["type"] == "Split" else None
    if parts[-1]["use_regex"] != (pattern is None) or len(parts) > 2:
        return None
    return next((name for name, known_pattern in SPLITS.items() if known_pattern == pattern), None)


def from_metadata(metadata: dict[str, Any]) -> Any:
    """The `PreTrainedTokenizerFast` of a file. Raises ValueError if it has none, or one that is not supported."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def value_of(name: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}")

    names, kinds, pre = value_of("tokens"), value_of("token_type"), value_of("pre") or "gpt-2"
    if value_of("model") != "gpt2" or pre not in SPLITS:
        raise ValueError(
            f"the tokenizer of the file is {value_of('model')!r} with the splitter {pre!r}; expected 'gpt2' with one "
            f"of {', '.join(SPLITS)}: pass a tokenizer of your own"
        )
    if not isinstance(names, list) or len(set(names)) != len(names) or (kinds is not None and len(kinds) != len(names)):
        raise ValueError("tokenizer.ggml.tokens and token_type do not name each token once")
    kinds = [NORMAL] * len(names) if kinds is None else [int(x) for x in kinds]
    merges = [tuple(x.split(" ")) for x in value_of("merges") or []]
    vocabulary = {name: i for i, (name, kind) in enumerate(zip(names, kinds, strict=True)) if kind != UNUSED}
    if any(len(pair) != 2 or {*pair, "".join(pair)} - {*names} for pair in merges):
        raise ValueError("tokenizer.ggml.merges has pairs that are not of its tokens")
    bpe = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    pattern = SPLITS[pre]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    bpe.pre_tokenizer = letters if pattern is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), letters]
    )  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    for name, kind in zip(names, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            token = AddedToken(name, special=kind == CONTROL, normalized=False)
            (bpe.add_special_tokens if kind == CONTROL else bpe.add_tokens)([token])
    special = {}
    for name in "bos", "eos", "unk", "pad":
        token = value_of(f"{_LONG.get(name, name)}_token_id")
        if token is not None:
            if not 0 <= token < len(names):
                raise ValueError(f"the {name} token is {token}, of {len(names)} tokens")
            special[name] = names[token]
    around = [special[x] if value_of(f"add_{x}_token") and x in special else None for x in ("bos", "eos")]
    if any(around):
        first, last = ([x] if x else [] for x in around)
        bpe.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *first, "$B", *last],
            special_tokens=[(x, vocabulary[x]) for x in {*first, *last}],
        )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, **{f"{x}_token": name for x, name in special.items()}
    )
    if template := metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = template
    return tokenizer
