"""Masked image modelling: masked autoencoders (He et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tutti.train.tasks.draw import generator
from tutti.train.tasks.images import augmented, pixels
from tutti.train.tasks.task import Task


@dataclass(frozen=True)
class MaskedImage(Task):
    """Reconstruct the patches of an image that are masked (`ViTMAEForPreTraining`).

    The model masks the fraction `config.mask_ratio` of patches, those with the largest noise. The batch has this
    noise, a function of the seed and the sample.

    image: column of images (of PIL, or uint8 arrays of (height, width, channels)).
    patches: patches of an image, (image_size / patch_size)^2.
    flip, crop: augmentation (`tutti.train.tasks.images.augmented`).
    size: side of the images in pixels, where there is no image processor.
    """

    image: str = "image"
    patches: int = 196
    flip: bool = False
    crop: float | None = None
    size: int | None = None

    name = "masked-image"
    model_class = "AutoModelForPreTraining"

    def columns(self):
        return (self.image,)

    def feature(self, row, processor):
        return {"image": row[self.image]}

    def batch(self, features, processor):
        images, noise = [], []
        for f in features:
            draw = generator(self.seed, f, np.asarray(f["image"]))
            noise.append(draw.random(self.patches, np.float32))
            images.append(augmented(f["image"], draw, self.flip, self.crop))
        pixel_values = pixels(images, processor, self.size)
        return {"pixel_values": pixel_values, "noise": torch.from_numpy(np.stack(noise))}

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        config = getattr(model, "config", None)
        if config is not None and hasattr(config, "image_size") and hasattr(config, "patch_size"):
            count = (config.image_size // config.patch_size) ** 2
            if count != self.patches:
                raise ValueError(f"the model has {count} patches, patches is {self.patches}; set patches={count}")
