"""Images and sound of a request, as the processor of a model reads them."""

from __future__ import annotations

import base64
import binascii
import io
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tutti.serve.values import Json, JsonValue, JsonView, Processor

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST, MANY = 32 << 20, 64  # pixels of all images of a request; images
FORMATS = "PNG", "JPEG", "WEBP", "GIF"
TEXTS = "text", "input_text", "output_text"


def images(sources: Sequence[bytes | Path]) -> list[Image]:
    """Images (`PIL.Image`, RGB) from the contents or paths of PNG, JPEG, WebP and GIF files.

    Raises ValueError for what is none, and for too many images or pixels, before any is decoded.
    """
    from PIL import Image

    if len(sources) > MANY:
        raise ValueError(f"{len(sources)} images; a request has at most {MANY}")
    try:
        opened = [Image.open(io.BytesIO(x) if isinstance(x, bytes) else x, formats=FORMATS) for x in sources]
        if (pixels := sum(x.width * x.height for x in opened)) > LARGEST:
            raise ValueError(f"images of {pixels} pixels; a request has at most {LARGEST}")
        return [x.convert("RGB") for x in opened]
    except Image.DecompressionBombError as error:
        raise ValueError(f"an image is too large: {error}") from error
    except (OSError, SyntaxError) as error:
        raise ValueError("not an image in PNG, JPEG, WebP or GIF") from error


def contents_of(url: str) -> bytes:
    """The contents of a `data:` URL. Other URLs are refused: a server does not fetch what clients name."""
    head, comma, body = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ValueError("images are given as data:image/...;base64,... URLs")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the image's base64 is wrong: {error}") from error


def sound(source: bytes | Path) -> tuple[np.ndarray, int]:
    """The samples (n,) of a WAV file of 16 bits, float32 in [-1, 1), channels averaged, and its sampling rate in Hz."""
    try:
        with wave.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as file:
            if file.getsampwidth() != 2:
                raise ValueError(f"sound of {8 * file.getsampwidth()} bits; WAV files of 16 bits are read")
            raw = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            return (raw.reshape(-1, file.getnchannels()).mean(1) / 32768).astype(np.float32), file.getframerate()
    except (wave.Error, EOFError) as error:
        raise ValueError(f"not a WAV file: {error}") from error


def begins(processor: Processor, text: str) -> bool:
    """Whether the tokenizer of a processor adds the token that begins a text: it does unless the text has it."""
    first = getattr(processor.tokenizer, "bos_token", None)
    return not (first and text.startswith(first))


def seen(processor: Processor, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens of a text with images, and the inputs of the model. Images without a mark in the text come first."""
    mark = getattr(processor, "image_token", None)
    if mark is None or not hasattr(processor, "image_processor"):
        raise ValueError("the model does not see images")
    if missing := len(images) - text.count(mark):
        if missing < 0:
            raise ValueError(f"the text has {text.count(mark)} marks {mark}, for {len(images)} images")
        text = mark * missing + text
    processed = processor(
        text=text, images=list(images), return_tensors="pt", add_special_tokens=begins(processor, text)
    )
    inputs = {name: x for name, x in processed.items() if name not in ("input_ids", "attention_mask")}
    return processed["input_ids"][0].tolist(), inputs


def messages_with_images(messages: Sequence[JsonView]) -> tuple[list[Json], list[Image]]:
    """Messages of a chat as templates read them, and their images. Raises ValueError for parts of other kinds."""
    shaped, files = [], []
    for message in messages:
        parts = []
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            if part.get("type") == "image_url":
                files.append(contents_of(part["image_url"]["url"]))
                parts.append({"type": "image"})
            elif part.get("type") in TEXTS:
                parts.append({"type": "text", "text": part["text"]})
            else:
                raise ValueError(f"a part of kind {part.get('type')!r}; expected text or image_url")
        shaped.append({**message, "content": parts})
    return shaped, images(files)


def in_line(content: JsonValue, mark: str) -> JsonValue:
    """The parts of a message as one text, for templates that know no others. mark: text for an image."""
    if not isinstance(content, list):
        return content
    return "".join(mark if x["type"] == "image" else x["text"] for x in content)


def heard(processor: Processor, samples: np.ndarray, rate: int) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens with which the decoder begins, and the inputs of the model, for sound of a sampling rate in Hz."""
    extractor = getattr(processor, "feature_extractor", None)
    if extractor is None:
        raise ValueError("the model does not hear")
    if rate != extractor.sampling_rate:
        raise ValueError(f"the sound has {rate} samples a second; the model hears {extractor.sampling_rate}")
    if len(samples) > extractor.n_samples:
        most = extractor.n_samples / rate
        raise ValueError(f"the sound lasts {len(samples) / rate:.1f} s; the model hears {most:.0f} s")
    features = extractor(samples, sampling_rate=rate, return_tensors="pt")["input_features"]
    return list(getattr(processor.tokenizer, "prefix_tokens", [])), {"input_features": features}
