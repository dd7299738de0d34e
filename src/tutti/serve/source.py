"""What a prompt has besides the tokens of the decoder: the source of an encoder-decoder model, or images.

An encoder runs once for a request. What it gives is kept: keys and values of a source in blocks of the cache, and the
embeddings of images in memory until the request ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tutti import compat
from tutti.nn.quantized.quantized_linear import dtype_of
from tutti.serve.cache.attention import Cache
from tutti.serve.cache.blocks import Digest
from tutti.serve.cache.cross import write
from tutti.serve.values import EncoderInputs, JsonValue, Model, Prompt

Tokens = Callable[[Prompt], list[int]]


@dataclass(eq=False)
class Source:
    """What the encoder of a request reads. Requests with the same inputs share the result.

    inputs: arguments of the encoder, by name. length: positions of its result. slots: how many of the cache it needs.
    places: the positions of the prompt that its result is put in. features: the result (length, hidden) of images.
    """

    inputs: dict[str, Tensor]
    length: int
    slots: int = 0
    places: np.ndarray | None = None
    features: Tensor | None = None
    digest: Digest = field(init=False)
    chain: list[Digest] = field(default_factory=list)  # of its blocks

    def __post_init__(self) -> None:
        of = hashlib.blake2b(digest_size=16)
        for name, x in sorted(self.inputs.items()):
            of.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
            of.update(x.contiguous().view(torch.uint8).numpy().tobytes())
        self.digest = of.digest()

    def digests(self, size: int) -> list[Digest]:
        """The digests of its blocks of the cache. The last may be partly filled: nothing is added to a source."""
        for i in range(len(self.chain), -(-self.slots // size)):
            self.chain.append(hashlib.blake2b(self.digest + i.to_bytes(4, "little"), digest_size=16).digest())
        return self.chain


class Encoder:
    """The encoder of a model.

    name: name of the input that it reads. longest: number of positions of its result, at most.
    """

    crosses = False  # whether a decoder attends to its result; otherwise that is put in the place of tokens

    def __init__(self, model: Model, name: str, longest: int):
        self.model, self.name, self.longest = model, name, longest
        self._lengths: dict[tuple, int] = {}

    def example(self) -> dict[str, Tensor]:
        """Arguments to capture it with."""
        raise NotImplementedError

    def run(self, cache: Cache, inputs: dict[str, Tensor], slots: Tensor) -> Tensor:
        """Compute its result. slots: slot of the cache of each position (positions,), or -1."""
        raise NotImplementedError

    def read(self, prompt: Prompt, inputs: EncoderInputs, tokens: Tokens) -> tuple[list[int], Source | None]:
        """The prompt of the decoder, and the source. tokens: makes tokens of a prompt. Raises ValueError for inputs
        that the model does not have."""
        raise NotImplementedError

    def calls(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The arguments of the calls for a source. Few shapes serve all sources."""
        return [inputs]

    def shapes(self) -> list[dict[str, Tensor]]:
        """Arguments of all shapes."""
        return [self.example()]

    def _checked(self, inputs: EncoderInputs) -> dict[str, Tensor]:
        """The inputs of the encoder as tensors, in the dtype of the model."""
        dtype, example = dtype_of(self.model), self.example()
        tensors = {}
        for name, x in inputs.items():
            if name not in example:
                raise ValueError(f"{type(self.model).__name__} does not take the input {name!r}, only {list(example)}")
            try:
                x = torch.as_tensor(x).detach().cpu()
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"{name} is not a tensor: {error}") from error
            if x.shape[1:] != example[name].shape[1:]:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (n, *{tuple(example[name].shape[1:])})")
            if x.is_floating_point() and not bool(x.isfinite().all()):
                raise ValueError(f"{name} has numbers that are not finite")
            tensors[name] = x.to(dtype) if x.is_floating_point() else x
        return tensors

    def length(self, inputs: dict[str, Tensor]) -> int:
        """The positions of the result for inputs of such shapes."""
        key = tuple((name, *x.shape) for name, x in inputs.items())
        if key not in self._lengths:
            with compat.fake_mode() as mode, torch.no_grad():
                fake: dict[str, Tensor] = {name: mode.from_tensor(x) for name, x in inputs.items()}
                self._lengths[key] = self.positions(fake).shape[-2]
        return self._lengths[key]

    def positions(self, inputs: dict[str, Tensor]) -> Tensor:
        """Its result (..., positions, width)."""
        raise NotImplementedError

    def fits(self, source: Source, prompt: int) -> bool:
        """Whether a source of another engine is of this encoder. prompt: tokens of the decoder's prompt."""
        own, inputs, places = self.example(), source.inputs, source.places
        alike = bool(inputs) and all(
            name in own and x.ndim == own[name].ndim and x.dtype == own[name].dtype
            and (self.name == "input_ids" or x.shape[1:] == own[name].shape[1:]) for name, x in inputs.items()
        )  # fmt: skip
        if self.crosses:
            return alike and places is None and 0 < source.slots == source.length <= self.longest
        if places is None or places.shape != (source.length,) or places.dtype != np.int64:
            return False
        if not alike or source.slots or not source.length:
            return False
        features = source.features
        return (places[0] >= 0 and places[-1] < prompt and bool((np.diff(places) > 0).all())
                and (features is None or (features.ndim == 2 and len(features) == source.length)))  # fmt: skip


class CrossEncoder(Encoder):
    """The encoder of an encoder-decoder model, of tokens (T5, BART) or of features (Whisper)."""

    crosses = True

    def __init__(self, model: Model, name: str, longest: int):
        super().__init__(model, name, longest)
        config, generation = model.config, getattr(model, "generation_config", None)

        def token_of(name: str) -> int | None:
            value = getattr(generation, name, None)
            return getattr(config, name, None) if value is None else value

        first = token_of("decoder_start_token_id")
        first = token_of("bos_token_id") if first is None else first
        self.start = [x for x in (first, token_of("forced_bos_token_id")) if x is not None]

    def example(self) -> dict[str, Tensor]:
        if self.name == "input_ids":
            return {name: torch.ones(1, 1, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
        config = self.model.config
        shape = 1, config.num_mel_bins, 2 * config.max_source_positions
        return {self.name: torch.zeros(shape, dtype=dtype_of(self.model))}

    def run(self, cache: Cache, inputs: dict[str, Tensor], slots: Tensor) -> Tensor:
        write(self.model, cache, slots, self.positions(inputs))
        return slots[:1]

    def positions(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model.get_encoder()(**inputs).last_hidden_state

    def read(self, prompt: Prompt, inputs: EncoderInputs, tokens: Tokens) -> tuple[list[int], Source | None]:
        if self.name == "input_ids":
            begun = inputs.get("decoder_input_ids")
            if extra := sorted(inputs.keys() - {"decoder_input_ids"}):
                raise ValueError(f"{type(self.model).__name__} reads tokens: give them as the prompt, not {extra}")
            source = tokens(prompt)
            inputs_of_encoder = {"input_ids": torch.tensor([source])}
            begun = self._start() if begun is None else tokens(_row(begun))
        else:
            if self.name not in inputs:
                raise ValueError(f"{type(self.model).__name__} reads {self.name}: give them in Request(inputs=...)")
            inputs_of_encoder = self._checked(inputs)
            if len(inputs_of_encoder[self.name]) != 1:
                raise ValueError(f"{self.name} has {len(inputs_of_encoder[self.name])} rows; a request has one")
            begun = tokens(prompt) if prompt else self._start()
        length = inputs_of_encoder["input_ids"].shape[1] if self.name == "input_ids" else self.length(inputs_of_encoder)
        if length > self.longest:
            raise ValueError(f"the source has {length} positions; the engine holds {self.longest}")
        return begun, Source(inputs_of_encoder, length, slots=length)

    def _start(self) -> list[int]:
        if not self.start:
            raise ValueError("the model has no decoder_start_token_id: give the decoder's first tokens")
        return list(self.start)

    def calls(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return [_padded(inputs["input_ids"], self.longest)] if self.name == "input_ids" else [inputs]

    def shapes(self) -> list[dict[str, Tensor]]:
        if self.name != "input_ids":
            return [self.example()]
        sizes = {_rounded(1 << i, self.longest) for i in range(self.longest.bit_length())}
        return [_padded(torch.ones(1, n, dtype=torch.int64), self.longest) for n in sorted({*sizes, self.longest})]


def _row(tokens: JsonValue) -> list[int]:
    """The only row of tokens (1, n) or (n,)."""
    row = torch.as_tensor(tokens)
    if row.is_floating_point() or row.numel() != row.shape[-1]:
        raise ValueError(f"decoder_input_ids is {row.dtype} {tuple(row.shape)}; expected integers (1, n)")
    return row.flatten().tolist()


def _rounded(n: int, longest: int) -> int:
    """The length that sources of n tokens are padded to: a power of 2 from 16 on."""
    return min(max(16, 1 << (n - 1).bit_length()), longest)


def _padded(ids: Tensor, longest: int) -> dict[str, Tensor]:
    n = ids.shape[1]
    size = _rounded(n, longest)
    own = (torch.arange(size) < n).long()[None]
    return {"input_ids": torch.nn.functional.pad(ids, (0, size - n)), "attention_mask": own}


class ImageEncoder(Encoder):
    """The vision tower of a language model. Its result takes the place of the prompt's image tokens."""

    def __init__(self, model: Model, longest: int):
        super().__init__(model, "pixel_values", longest)
        config = model.config
        self.token = getattr(config, "image_token_id", None) or config.image_token_index

    def example(self) -> dict[str, Tensor]:
        config = self.model.config.vision_config
        shape = 1, getattr(config, "num_channels", 3), *_pair(config.image_size)
        return {self.name: torch.zeros(shape, dtype=dtype_of(self.model))}

    def run(self, cache: Cache, inputs: dict[str, Tensor], slots: Tensor) -> Tensor:
        return self.positions(inputs)

    def calls(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """An image each."""
        return [{name: x[i : i + 1] for name, x in inputs.items()} for i in range(len(inputs[self.name]))]

    def positions(self, inputs: dict[str, Tensor]) -> Tensor:
        features = self.model.get_image_features(**inputs)
        features = getattr(features, "pooler_output", features)
        return (
            features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat([x.flatten(0, -2) for x in features])
        )

    def read(self, prompt: Prompt, inputs: EncoderInputs, tokens: Tokens) -> tuple[list[int], Source | None]:
        ids = tokens(prompt)
        places = np.flatnonzero(np.array(ids) == self.token)
        if not inputs:
            if len(places):
                raise ValueError(f"the prompt has {len(places)} image tokens; give pixel_values in Request(inputs=...)")
            return ids, None
        images = self._checked(inputs)
        if self.name not in images or not all(len(x) for x in images.values()):
            raise ValueError(f"there are no images: give {self.name} (images, channels, height, width)")
        length = sum(map(self.length, self.calls(images)))
        if length != len(places):
            raise ValueError(f"the images have {length} positions, the prompt {len(places)} image tokens")
        return ids, Source(images, length, places=places)


def encoder_of(model: Model, longest: int, slots: int) -> Encoder | None:
    """The encoder of a model that has one and can be served with it.

    longest: number of tokens of a text, at most. slots: number of slots of the cache.
    """
    config = model.config
    if config.is_encoder_decoder:
        name, most = model.main_input_name, getattr(config, "max_source_positions", None)
        if name != "input_ids" and (name != "input_features" or not most or not hasattr(config, "num_mel_bins")):
            raise ValueError(f"the encoder of {type(model).__name__} reads {name}, which the engine cannot")
        return CrossEncoder(model, name, min(longest if name == "input_ids" else most or longest, slots))
    if not _sees(model):
        return None
    encoder = ImageEncoder(model, longest)
    try:
        encoder.length(encoder.example())
    except (TypeError, ValueError, AttributeError, IndexError):  # its images have other inputs: it is served for text
        return None
    return encoder


def _sees(model: Model) -> bool:
    """Whether images of fixed size take the place of tokens that are causal like others, at positions in one line."""
    from inspect import signature

    config = model.config
    whole = getattr(model, "model", model)
    return (
        hasattr(config, "vision_config")
        and hasattr(model, "get_image_features")
        and hasattr(config.vision_config, "image_size")
        and not hasattr(whole, "get_rope_index")
        and "token_type_ids" not in signature(model.forward).parameters
    )


def _pair(size: JsonValue) -> tuple[int, int]:
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def embedded(model: nn.Module, tokens: Tensor, features: Tensor, marks: Tensor) -> Tensor:
    """The embeddings (tokens, hidden) of tokens, or features (tokens, hidden) where `marks` (tokens,) is true."""
    embeddings: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    return torch.where(marks[:, None], features, embeddings(tokens.masked_fill(marks, 0)))
