"""Decode the bytes of a file by its suffix."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import numpy as np

from tutti.data.rows import BadRow
from tutti.data.sources.source import needed

IMAGES = ("jpg", "jpeg", "png", "bmp", "gif", "webp", "tif", "tiff", "ppm")
AUDIO = ("wav", "flac", "ogg", "mp3")


def decoded(content: bytes, kind: str, name: str) -> Any:
    """The value of a file: an RGB image, audio, JSON, text, an integer (`cls`), an array (`npy`), or bytes.

    kind: suffix without the dot. name: for errors. Raises BadRow.
    """
    last = kind.rpartition(".")[2]
    try:
        if last in IMAGES:
            image = needed("PIL.Image", "pillow", "an image").open(BytesIO(content))
            image.load()
            return image.convert("RGB")
        if last in AUDIO:
            array, rate = needed("soundfile", "soundfile", "audio").read(BytesIO(content), dtype="float32")
            return {"array": array, "sampling_rate": rate}
        if last == "json":
            return json.loads(content)
        if last in ("txt", "text"):
            return content.decode()
        if last in ("cls", "index"):
            return int(content)
        if last == "npy":
            return np.load(BytesIO(content), allow_pickle=False)
    except ImportError:
        raise
    except Exception as error:  # of any decoder
        raise BadRow(f"{name}: not a {last} file ({error}); replace it, or read with on_bad='skip'") from None
    return content
