"""Which class an image is of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tutti.train.tasks.draw import generator
from tutti.train.tasks.images import augmented, pixels
from tutti.train.tasks.scores import arrays, class_scores
from tutti.train.tasks.task import Task, check_class_labels, classes_of
from tutti.train.values import Outputs


@dataclass(frozen=True)
class ImageClassification(Task):
    """One label for an image.

    image: column of images (of PIL, or uint8 arrays of (height, width, channels)).
    label: column of integers.
    flip, crop: augmentation (`tutti.train.tasks.images.augmented`), a function of the seed and the sample. Use the
        task without them to evaluate.
    size: side of the images in pixels, where there is no image processor.
    """

    image: str = "image"
    label: str = "label"
    flip: bool = False
    crop: float | None = None
    size: int | None = None

    name = "image-classification"
    model_class = "AutoModelForImageClassification"

    def columns(self):
        return self.image, self.label

    def feature(self, row, processor):
        return {"image": row[self.image], "labels": row[self.label]}

    def batch(self, features, processor):
        images = [
            augmented(f["image"], generator(self.seed, f, np.asarray(f["image"])), self.flip, self.crop)
            if self.flip or self.crop is not None
            else f["image"]
            for f in features
        ]
        labels = torch.tensor([f["labels"] for f in features])
        return {"pixel_values": pixels(images, processor, self.size), "labels": labels}

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` and `f1` (mean over classes)."""
        predictions, labels = arrays(prediction)
        return class_scores(predictions.argmax(-1) if predictions.ndim == 2 else predictions, labels)

    def _check_labels(self, model, rows) -> None:
        check_class_labels(rows, self.label, classes_of(model))
