"""Contrastive learning of images and texts (CLIP, Radford et al. 2021)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.train.tasks.draw import generator
from tutti.train.tasks.images import augmented, pixels
from tutti.train.tasks.task import Task, length_of, padded
from tutti.train.values import Outputs


@dataclass(frozen=True)
class Contrastive(Task):
    """Match each image of a batch with its text, among all texts of the batch, and each text with its image.

    The loss is over the global batch, however many devices share it. Accumulation changes it: with k microbatches
    each image is compared with 1/k of the texts. So use `accumulate=1`.

    image: column of images (of PIL, or uint8 arrays of (height, width, channels)).
    text: column of texts.
    length: longest text; by default the tokenizer's `model_max_length`.
    flip, crop: augmentation (`tutti.train.tasks.images.augmented`).
    size: side of the images in pixels, where the processor has no image processor.
    buckets: lengths to which texts are padded; None: `length`, so that all batches have one shape.

    The processor has a `tokenizer` and an `image_processor` (`CLIPProcessor`), or is a tokenizer.
    """

    image: str = "image"
    text: str = "text"
    length: int | None = None
    flip: bool = False
    crop: float | None = None
    size: int | None = None
    buckets: Sequence[int] | None = None

    name = "contrastive"
    model_class = "AutoModel"

    def columns(self):
        return self.image, self.text

    def texts(self):
        return (self.text,)

    def feature(self, row, processor):
        return {"image": row[self.image], "text": row[self.text]}

    def batch(self, features, processor):
        tokenizer = getattr(processor, "tokenizer", processor)
        vision = getattr(processor, "image_processor", None)
        images = [augmented(f["image"], generator(self.seed, f, f["text"]), self.flip, self.crop) for f in features]
        limit = length_of(self.length, tokenizer)
        encoded = tokenizer(
            [f["text"] for f in features], truncation=True, max_length=limit, padding=True, return_tensors="pt"
        )
        text = {key: encoded[key] for key in ("input_ids", "attention_mask")}
        text = padded(text, tokenizer, (limit,) if self.buckets is None else self.buckets)
        return {**text, "pixel_values": pixels(images, vision, self.size), "return_loss": True}

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` of the text that is nearest to an image, among the texts of its batch.

        predictions: logits_per_image (first), (rows, batch), batches one after the other.
        """
        predictions = prediction.predictions
        logits = np.asarray(predictions[0] if isinstance(predictions, tuple | list) else predictions)
        return {"accuracy": float((logits.argmax(-1) == np.arange(len(logits)) % logits.shape[1]).mean())}

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        if "return_loss" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"{type(model).__name__} has no contrastive loss (return_loss); use a model like CLIPModel"
            )
        text = getattr(getattr(model, "config", None), "text_config", None)
        tokenizer = getattr(processor, "tokenizer", processor)
        if text is not None:
            limit, length = text.max_position_embeddings, length_of(self.length, tokenizer)
            if length > limit:
                raise ValueError(f"texts of {length} tokens are longer than the model's {limit} positions; set length")
            if len(tokenizer) > text.vocab_size:
                raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {text.vocab_size}")
