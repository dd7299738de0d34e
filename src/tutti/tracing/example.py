"""An example batch for a transformers model, from the arguments of its forward method. Takes no memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

INSTEAD = "give package.module:function, which returns (model, batch)"
ONE_LABEL = ("ForImageClassification", "ForSequenceClassification")  # for a whole image or text


def example(model: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Build the inputs and labels of a transformers model in its dtype, on the meta device.

    Text has `seq` tokens. If it is scored against images, or transcribed from speech, it has at most as many as the
    model has positions.

    A model that scores texts against images (such as CLIP) is set to return its loss. Raises ValueError for an argument
    that the table does not contain.
    """
    parameters = inspect.signature(model.forward).parameters
    main, kind = model.main_input_name, type(model).__name__
    if "return_loss" in parameters:
        model.forward = functools.partial(model.forward, return_loss=True)
        needed = ["input_ids", "pixel_values"]
    else:
        needed = [main, "labels"]
    if unknown := [key for key in needed if key not in parameters]:
        raise ValueError(f"{kind} takes no {unknown[0]}: {INSTEAD}")
    inputs = {}
    for key in needed:
        make = GENERATORS.get(key)
        if make is None or (key == "labels" and main == "pixel_values" and not kind.endswith(ONE_LABEL)):
            raise ValueError(f"{kind} needs {key}, which cannot be generated: {INSTEAD}")
        inputs[key] = make(model, batch, seq)
    return inputs


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _part(model: nn.Module, name: str) -> Any:
    """The config of a part of the model, such as `vision_config`, else the model's config."""
    return getattr(model.config, name, None) or model.config


def _ids(model: nn.Module, batch: int, seq: int) -> torch.Tensor:
    if "return_loss" in inspect.signature(model.forward).parameters:
        seq = min(seq, _part(model, "text_config").max_position_embeddings)
    return _integers(batch, seq)


def _pixels(model: Any, batch: int, seq: int) -> torch.Tensor:
    config = _part(model, "vision_config")
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", None) or 3
    return torch.empty(batch, channels, height, width, dtype=model.dtype, device="meta")


def _spectrogram(model: Any, batch: int, seq: int) -> torch.Tensor:
    """Whisper's input: two frames for each position of its encoder."""
    config = model.config
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        raise ValueError(f"{type(model).__name__} needs input_features, which cannot be generated: {INSTEAD}")
    return torch.empty(batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=model.dtype, device="meta")


def _labels(model: nn.Module, batch: int, seq: int) -> torch.Tensor:
    if type(model).__name__.endswith(ONE_LABEL):
        return _integers(batch)
    longest = getattr(model.config, "max_target_positions", None)
    return _integers(batch, min(seq, longest)) if longest else _ids(model, batch, seq)


GENERATORS: dict[str, Callable[[Any, int, int], torch.Tensor]] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "input_features": _spectrogram,
    "labels": _labels,
}
