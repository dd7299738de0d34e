"""Diffusion models and rectified flows over images, from noise, a class or a text.

With data x, noise e ~ N(0, 1) and a timestep t:

| prediction | noised data | the model learns |
|---|---|---|
| epsilon | a_t x + s_t e | e (Ho et al. 2020) |
| v | a_t x + s_t e | a_t e - s_t x (Salimans and Ho 2022) |
| flow | (1 - u) x + u e, u in [0, 1], t = 1000 u | e - x (Liu et al. 2023) |

a_t^2 + s_t^2 = 1; a_t^2 is the product of 1 - beta up to t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tutti.data.rows import no_column
from tutti.data.sources.source import needed
from tutti.train.tasks.draw import generator
from tutti.train.tasks.images import augmented, pixels
from tutti.train.tasks.task import Task, check_class_labels, length_of
from tutti.train.values import Processor

PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "flow": "flow"}
"""Our names, and those of diffusers' schedulers."""

STEPS = 1000


@dataclass(frozen=True)
class Diffusion(Task):
    """Train a denoiser of diffusers: UNet2DModel, UNet2DConditionModel, DiTTransformer2DModel, or `TextToImage`.

    image: column of images (of PIL, or uint8 arrays of (height, width, channels)); `latents` for arrays (channels,
        height, width) that are learned as they are.
    label: column of classes, for class-conditional models.
    text: column of texts, for `TextToImage`.
    prediction: "epsilon", "v" or "flow".
    schedule: betas as diffusers names them: "linear", "scaled_linear" or "squaredcos_cap_v2". A flow has none.
    drop: fraction of samples that learn without their condition, for classifier-free guidance (Ho and Salimans 2022):
        a class becomes `classes`, a text the empty one. DiT drops classes itself; use 0 with it.
    classes: number of classes; the model's embedding has one more if `drop` is not 0.
    flip, crop: augmentation (`tutti.train.tasks.images.augmented`).
    size: side of the images in pixels, where there is no image processor.
    length: tokens of a text; by default the tokenizer's `model_max_length`.

    Noise and timesteps are drawn on the device in the loss, by torch.randn_like and torch.rand: in a captured step they
    are functions of the sample's place in the global batch and of the step. What the collator draws is a function of
    the seed and the sample.
    """

    image: str = "image"
    label: str | None = None
    text: str | None = None
    prediction: str = "epsilon"
    schedule: str = "squaredcos_cap_v2"
    drop: float = 0.0
    classes: int | None = None
    flip: bool = False
    crop: float | None = None
    size: int | None = None
    length: int | None = None

    name = "diffusion"
    model_class = ""

    def __post_init__(self) -> None:
        if self.prediction not in PREDICTIONS:
            raise ValueError(f"prediction is {self.prediction!r}; it must be one of {', '.join(PREDICTIONS)}")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is {self.drop}; it must be in [0, 1)")
        if self.drop and self.label is not None and self.classes is None:
            raise ValueError("give classes: a dropped label becomes the class of that index")
        if self.drop and self.label is None and self.text is None:
            raise ValueError("drop is of a condition; give label or text")

    # -- rows to batches -----------------------------------------------------------------------------------------

    def columns(self):
        return tuple(name for name in (self.image, self.label, self.text) if name is not None)

    def texts(self):
        return () if self.text is None else (self.text,)

    def feature(self, row, processor):
        kinds = {"image": self.image, "label": self.label, "text": self.text}
        return {kind: row[name] for kind, name in kinds.items() if name is not None}

    def batch(self, features, processor):
        images, labels, texts = [], [], []
        for f in features:
            draw = generator(self.seed, f, np.asarray(f["image"]))
            dropped = draw.random() < self.drop
            images.append(augmented(f["image"], draw, self.flip, self.crop))
            if self.label is not None:
                labels.append(self.classes if dropped else f["label"])
            if self.text is not None:
                texts.append("" if dropped else f["text"])
        collated: dict[str, Tensor] = {}
        if self.image == "latents":
            collated["pixel_values"] = torch.from_numpy(np.stack([np.asarray(x, np.float32) for x in images]))
        else:
            vision = processor if not hasattr(processor, "convert_tokens_to_ids") else None
            vision = getattr(vision, "image_processor", None if hasattr(vision, "tokenizer") else vision)
            collated["pixel_values"] = pixels(images, vision, self.size)
        if labels:
            collated["class_labels"] = torch.tensor(labels)
        if texts:
            collated["input_ids"] = self.tokens(texts, processor)
        return collated

    def tokens(self, texts: Sequence[str], processor: Processor) -> Tensor:
        """Token ids, (texts, length) int64, padded to the full length."""
        tokenizer = getattr(processor, "tokenizer", processor)
        limit = length_of(self.length, tokenizer)
        options = {"truncation": True, "max_length": limit, "padding": "max_length", "return_tensors": "pt"}
        return tokenizer(list(texts), **options)["input_ids"]

    # -- loss ----------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The mean square of prediction minus target, for one timestep of each sample."""
        x = batch["pixel_values"]
        model, x, condition = self._opened(model, x, batch)
        noise = torch.randn_like(x)
        uniform = torch.rand(x.shape[0], device=x.device, dtype=x.dtype)
        noised, target, time = self.noised(x, noise, uniform)
        return (denoised(model, noised, time, condition) - target).square().mean()

    def _opened(self, model: nn.Module, x: Tensor, batch: dict[str, Tensor]) -> tuple[nn.Module, Tensor, dict]:
        condition = {}
        if "class_labels" in batch:
            condition["class_labels"] = batch["class_labels"]
        if isinstance(model, TextToImage):
            condition["encoder_hidden_states"] = model.encoded(batch["input_ids"])
            x = model.latents(x)
            model = model.denoiser
        elif "encoder_hidden_states" in batch:
            condition["encoder_hidden_states"] = batch["encoder_hidden_states"]
        return model, x, condition

    def noised(self, x: Tensor, noise: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(noised data, target, timesteps) for numbers in [0, 1), one for each sample."""
        shape = (-1, *[1] * (x.ndim - 1))
        if self.prediction == "flow":
            u = uniform.view(shape)
            return (1 - u) * x + u * noise, noise - x, uniform * STEPS
        time = (uniform * STEPS).long()
        square = alphas(self.schedule).to(x.device, x.dtype)[time].view(shape)
        a, s = square.sqrt(), (1 - square).sqrt()
        return a * x + s * noise, noise if self.prediction == "epsilon" else a * noise - s * x, time

    # -- samples -------------------------------------------------------------------------------------------------

    def scheduler(self) -> Any:
        """A sampler of diffusers for this task: DDIM, or Euler steps of the flow."""
        diffusers = needed("diffusers", "diffusers", "a sampler")
        if self.prediction == "flow":
            return diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=STEPS)
        return diffusers.DDIMScheduler(
            num_train_timesteps=STEPS,
            beta_schedule=self.schedule,
            prediction_type=PREDICTIONS[self.prediction],
            clip_sample=False,
            set_alpha_to_one=False,
            timestep_spacing="trailing",
        )

    @torch.no_grad()
    def sample(
        self,
        model: nn.Module,
        shape: Sequence[int],
        steps: int = 50,
        *,
        labels: Tensor | None = None,
        texts: Sequence[str] | None = None,
        processor: Processor = None,
        guidance: float = 1.0,
        scheduler: Any = None,
        seed: int = 0,
    ) -> Tensor:
        """Samples of a trained model, in the range of its data.

        shape: (samples, channels, height, width) of what the denoiser sees.
        steps: steps of the sampler.
        labels: classes, (samples,) int64. texts: as many texts; they need the processor.
        guidance: strength w of classifier-free guidance: none + w (conditioned - none). 1: no guidance.
        scheduler: a scheduler of diffusers with this task's prediction and schedule; None: `self.scheduler()`.
        """
        device = next(model.parameters()).device
        sampler = scheduler or self.scheduler()
        sampler.set_timesteps(steps)
        condition, none = self._conditions(model, shape[0], labels, texts, processor, guidance, device)
        inner = model.denoiser if isinstance(model, TextToImage) else model
        x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device)
        x = x * getattr(sampler, "init_noise_sigma", 1.0)
        for time in sampler.timesteps:
            at = time.expand(shape[0]).to(device)
            predicted = denoised(inner, x, at, condition)
            if none is not None:
                base = denoised(inner, x, at, none)
                predicted = base + guidance * (predicted - base)
            x = sampler.step(predicted, time, x, return_dict=False)[0]
        return model.images(x) if isinstance(model, TextToImage) else x

    def _conditions(self, model, count, labels, texts, processor, guidance, device) -> tuple[dict, dict | None]:
        """What the model is given, and the same without condition if there is guidance."""
        condition: dict[str, Tensor] = {}
        none: dict[str, Tensor] = {}
        if labels is not None:
            condition["class_labels"] = labels.to(device)
            if guidance != 1:
                if self.classes is None:
                    raise ValueError("guidance needs classes: the index of the class that stands for none")
                none["class_labels"] = torch.full_like(condition["class_labels"], self.classes)
        if texts is not None:
            condition["encoder_hidden_states"] = model.encoded(self.tokens(texts, processor).to(device))
            none["encoder_hidden_states"] = model.encoded(self.tokens([""] * count, processor).to(device))
        if guidance != 1 and not condition:
            raise ValueError("guidance is towards a condition; give labels or texts")
        return condition, none if guidance != 1 else None

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_processor(self, model, processor) -> None:
        if isinstance(model, TextToImage) != (self.text is not None):
            raise ValueError("a text column and a TextToImage model belong together")

    def _check_labels(self, model, rows) -> None:
        if self.label is not None:
            if self.label not in rows[0]:
                raise ValueError(no_column(self.label, list(rows[0]), "the dataset"))
            check_class_labels(rows, self.label, self.classes)


class TextToImage(nn.Module):
    """A denoiser with a frozen text encoder and, for latent diffusion, a frozen autoencoder.

    denoiser: UNet2DConditionModel, or another model with `encoder_hidden_states`.
    text_encoder: a model of transformers with `last_hidden_state`.
    vae: AutoencoderKL, or None to learn pixels.
    """

    def __init__(self, denoiser: nn.Module, text_encoder: nn.Module, vae: nn.Module | None = None):
        super().__init__()
        self.denoiser, self.text_encoder, self.vae = denoiser, text_encoder.eval(), vae.eval() if vae else None
        for frozen in (self.text_encoder, self.vae):
            if frozen is not None:
                frozen.requires_grad_(False)

    def train(self, mode: bool = True) -> TextToImage:
        """Set the mode of the denoiser. What is frozen stays in evaluation mode."""
        self.denoiser.train(mode)
        self.training = mode
        return self

    def encoded(self, input_ids: Tensor) -> Tensor:
        """(batch, length, width)"""
        with torch.no_grad():
            return self.text_encoder(input_ids=input_ids).last_hidden_state

    def latents(self, x: Tensor) -> Tensor:
        """The means of the autoencoder's latents, scaled; the images themselves if there is none."""
        if self.vae is None:
            return x
        with torch.no_grad():
            return self.vae.encode(x).latent_dist.mode() * self.vae.config.scaling_factor  # pyright: ignore

    def images(self, x: Tensor) -> Tensor:
        """The images of latents."""
        return x if self.vae is None else self.vae.decode(x / self.vae.config.scaling_factor).sample  # pyright: ignore


def denoised(model: nn.Module, x: Tensor, time: Tensor, condition: dict[str, Tensor]) -> Tensor:
    """The model's prediction, with as many channels as x (some models also predict a variance)."""
    output = model(x, time, **condition)
    return getattr(output, "sample", output)[:, : x.shape[1]]


def alphas(schedule: str) -> Tensor:
    """a_t^2 for 1000 timesteps, float32 of shape (1000,), as the schedulers of diffusers have it."""
    return torch.tensor(_alphas(schedule))


@cache
def _alphas(schedule: str) -> list[float]:
    if schedule == "linear":  # Ho et al. 2020
        betas = np.linspace(1e-4, 0.02, STEPS)
    elif schedule == "scaled_linear":  # Rombach et al. 2022
        betas = np.linspace(1e-4**0.5, 0.02**0.5, STEPS) ** 2
    elif schedule == "squaredcos_cap_v2":  # Nichol and Dhariwal 2021
        square = np.cos((np.arange(STEPS + 1) / STEPS + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - square[1:] / square[:-1], 0.999)
    else:
        raise ValueError(f"schedule is {schedule!r}; it may be linear, scaled_linear or squaredcos_cap_v2")
    return np.cumprod(1 - betas).tolist()
