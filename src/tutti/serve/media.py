"""Images and sound of a request, as the processor of a model reads them."""

from __future__ import annotations

import base64
import binascii
import io
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

LARGEST = 64 << 20  # pixels of an image
TEXTS = "text", "input_text", "output_text"


def image(source: bytes | Path) -> Any:
    """An image (`PIL.Image`, RGB) from a file's contents or path. Raises ValueError for what is none, or too large."""
    from PIL import Image

    try:
        found = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        if found.width * found.height > LARGEST:
            raise ValueError(f"an image of {found.width} x {found.height} pixels; at most {LARGEST} are read")
        return found.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not an image: {error}") from error


def image_of_url(url: str) -> Any:
    """An image in a `data:` URL. Other URLs are refused: a server does not fetch what clients name."""
    head, comma, body = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ValueError("images are given as data:image/...;base64,... URLs")
    try:
        return image(base64.b64decode(body, validate=True))
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


def seen(processor: Any, text: str, images: Sequence[Any]) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens of a text with images, and the inputs of the model. Images without a mark in the text come first."""
    mark = getattr(processor, "image_token", None)
    if mark is None or not hasattr(processor, "image_processor"):
        raise ValueError("the model has no processor of images")
    if missing := len(images) - text.count(mark):
        if missing < 0:
            raise ValueError(f"the text has {text.count(mark)} marks {mark}, for {len(images)} images")
        text = mark * missing + text
    made = processor(text=text, images=list(images), return_tensors="pt")
    inputs = {name: x for name, x in made.items() if name not in ("input_ids", "attention_mask")}
    return made["input_ids"][0].tolist(), inputs


def messages_with_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages of a chat as templates read them, and their images. Raises ValueError for parts of other kinds."""
    made, images = [], []
    for message in messages:
        parts = []
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            if part.get("type") == "image_url":
                images.append(image_of_url(part["image_url"]["url"]))
                parts.append({"type": "image"})
            elif part.get("type") in TEXTS:
                parts.append({"type": "text", "text": part["text"]})
            else:
                raise ValueError(f"a part of kind {part.get('type')!r}; expected text or image_url")
        made.append({**message, "content": parts})
    return made, images


def in_line(content: Any, mark: str) -> Any:
    """The parts of a message as one text, for templates that know no others. mark: of an image."""
    if not isinstance(content, list):
        return content
    return "".join(mark if x["type"] == "image" else x["text"] for x in content)


def heard(processor: Any, samples: np.ndarray, rate: int) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens with which the decoder begins, and the inputs of the model, for sound of a sampling rate in Hz."""
    extractor = getattr(processor, "feature_extractor", None)
    if extractor is None:
        raise ValueError("the model has no processor of sound")
    if rate != extractor.sampling_rate:
        raise ValueError(f"the sound has {rate} samples a second; the model hears {extractor.sampling_rate}")
    if len(samples) > extractor.n_samples:
        most = extractor.n_samples / rate
        raise ValueError(f"the sound lasts {len(samples) / rate:.1f} s; the model hears {most:.0f} s")
    made = extractor(samples, sampling_rate=rate, return_tensors="pt")["input_features"]
    return list(getattr(processor.tokenizer, "prefix_tokens", [])), {"input_features": made}
