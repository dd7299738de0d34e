"""Pixels of images, and their augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tutti.train.values import Processor

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageLike = Image | np.ndarray | list  # of PIL, or uint8 values


def pixels(images: list[ImageLike], processor: Processor, size: int | None = None) -> Tensor:
    """pixel_values of some images, (batch, channels, height, width) float32.

    images: images of PIL, or uint8 arrays (height, width, channels).
    processor: an image processor, or a processor that has one. None: images are cut to a square in their middle,
        resized to `size` and scaled to [-1, 1].
    """
    processor = getattr(processor, "image_processor", processor)
    if processor is not None:
        return processor([image_of(x) for x in images], return_tensors="pt")["pixel_values"]
    return torch.from_numpy(np.stack([_scaled(x, size) for x in images]))


def image_of(x: ImageLike) -> Image:
    """An RGB image of PIL."""
    from PIL.Image import fromarray

    return (fromarray(np.asarray(x, np.uint8)) if isinstance(x, np.ndarray | list) else x).convert("RGB")


def _scaled(x: ImageLike, size: int | None) -> np.ndarray:
    if isinstance(x, np.ndarray | list) and (size is None or np.shape(x)[:2] == (size, size)):
        array = np.asarray(x, np.float32)
        array = array[..., None] if array.ndim == 2 else array
    else:
        image = image_of(x)
        if size is None:
            raise ValueError("give size, or an image processor: images have sizes of their own")
        short = min(image.size)
        left, top = (image.size[0] - short) // 2, (image.size[1] - short) // 2
        cut = image.crop((left, top, left + short, top + short))
        array = np.asarray(cut.resize((size, size)), np.float32)
    return np.ascontiguousarray(array.transpose(2, 0, 1)) / 127.5 - 1


def augmented(image: ImageLike, draw: np.random.Generator, flip: bool, crop: float | None) -> ImageLike:
    """An image flipped with probability 1/2, and a random part of it (Szegedy et al. 2015).

    crop: the smallest fraction of the area that is kept; the ratio of sides changes by up to 4/3. None: all.
    """
    if not flip and crop is None:
        return image
    from PIL import ImageOps

    image = image_of(image)
    if crop is not None:
        width, height = image.size
        area, ratio = draw.uniform(crop, 1) * width * height, np.exp(draw.uniform(-1, 1) * np.log(4 / 3))
        w, h = min(width, round((area * ratio) ** 0.5)), min(height, round((area / ratio) ** 0.5))
        left, top = int(draw.integers(0, width - w + 1)), int(draw.integers(0, height - h + 1))
        image = image.crop((left, top, left + max(w, 1), top + max(h, 1))).resize((width, height))
    return ImageOps.mirror(image) if flip and draw.random() < 0.5 else image
