"""Self-supervised learning of speech: wav2vec 2.0 (Baevski et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.data.rows import BadRow
from tutti.train.tasks.draw import generator, rounded
from tutti.train.tasks.task import Task

if TYPE_CHECKING:
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2ForPreTraining, Wav2Vec2GumbelVectorQuantizer


@dataclass(frozen=True)
class SpeechPretraining(Task):
    """Recognise the quantized features of masked frames among those of other masked frames of the same audio.

    The loss of a masked frame is the cross entropy of its own quantized feature against `negatives` others, by cosine
    similarity over a temperature (equation 3), plus the codebooks' diversity loss (equation 4) with the weights of the
    model's config. The loss of a batch is the mean over its masked frames.

    audio: column of `{"array": (samples,) float32, "sampling_rate": Hz}`.
    samples: samples of an audio in a batch; longer ones are cut at a random place, shorter ones are an error.
    frames: frames that the model makes of `samples`; None: computed for the kernels of wav2vec 2.
    probability: fraction of frames that would be masked if no spans overlapped.
    span: frames of a masked span.
    negatives: distractors of a masked frame.

    Cuts, masks and negatives are functions of the seed and the sample. The processor is a feature extractor, or has
    one.
    """

    audio: str = "audio"
    samples: int = 160_000
    frames: int | None = None
    probability: float = 0.65
    span: int = 10
    negatives: int = 100

    name = "speech-pretraining"
    model_class = "AutoModelForPreTraining"

    def columns(self):
        return (self.audio,)

    def feature(self, row, processor):
        audio, extractor = row[self.audio], getattr(processor, "feature_extractor", processor)
        if audio["sampling_rate"] != extractor.sampling_rate:
            raise BadRow(
                f"the audio has {audio['sampling_rate']} samples a second, the model {extractor.sampling_rate}; "
                f"open the source with sampling_rate={extractor.sampling_rate}"
            )
        if len(audio["array"]) < self.samples:
            raise BadRow(f"the audio has {len(audio['array'])} samples, fewer than {self.samples}; lower samples")
        return {"array": np.asarray(audio["array"], np.float32)}

    def batch(self, features, processor):
        extractor = getattr(processor, "feature_extractor", processor)
        frames = self.frames if self.frames is not None else frames_of(self.samples)
        audio, masks, others = [], [], []
        for f in features:
            draw = generator(self.seed, f, f["array"])
            at = int(draw.integers(0, len(f["array"]) - self.samples + 1))
            audio.append(f["array"][at : at + self.samples])
            mask = self.mask(draw, frames)
            masks.append(mask)
            others.append(self.distractors(draw, mask))
        values = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt")["input_values"]
        return {
            "input_values": values,
            "mask_time_indices": torch.from_numpy(np.stack(masks)),
            "sampled_negative_indices": torch.from_numpy(np.stack(others)),
        }

    def mask(self, draw: np.random.Generator, frames: int) -> np.ndarray:
        """Which frames are masked, (frames,) bool: spans that begin at random frames, maybe overlapping."""
        if frames < self.span + 1:
            raise ValueError(f"{frames} frames are fewer than a span of {self.span} and one more; raise samples")
        count = max(2, rounded(draw, self.probability * frames / self.span))
        starts = draw.choice(frames - self.span + 1, min(count, frames - self.span + 1), replace=False)
        masked = np.zeros(frames, bool)
        masked[(starts[:, None] + np.arange(self.span)).ravel()] = True
        return masked

    def distractors(self, draw: np.random.Generator, mask: np.ndarray) -> np.ndarray:
        """For each masked frame, other masked frames of the same audio, (frames, negatives) int64; else 0."""
        masked = np.flatnonzero(mask)
        drawn = np.zeros((len(mask), self.negatives), np.int64)
        places = draw.integers(0, len(masked) - 1, (len(masked), self.negatives))
        places += places >= np.arange(len(masked))[:, None]  # any but itself
        drawn[masked] = masked[places]
        return drawn

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The contrastive and the diversity loss.

        Computed from the model's modules: the model's own forward pass branches on values, and fills masked frames by
        an operator that no device can share.
        """
        inner = cast("Wav2Vec2ForPreTraining", model)
        config = inner.config
        mask, others = batch["mask_time_indices"], batch["sampled_negative_indices"]
        body = inner.wav2vec2
        hidden, features = body.feature_projection(body.feature_extractor(batch["input_values"]).transpose(1, 2))
        hidden = torch.where(mask[..., None], body.masked_spec_embed.to(hidden.dtype), hidden)
        states = inner.project_hid(body.encoder(hidden).last_hidden_state).float()  # (batch, frames, width)
        vectors, perplexity = quantized(inner.quantizer, inner.dropout_features(features), mask)
        right = inner.project_q(vectors).float()
        rows, frames, width = right.shape
        index = others.reshape(rows, -1, 1).expand(-1, -1, width)
        wrong = right.gather(1, index).view(rows, frames, -1, width)
        same = (wrong == right[:, :, None]).all(-1)
        every = torch.cat([right[:, :, None], wrong], dim=2)
        logits = F.cosine_similarity(states[:, :, None], every, dim=-1) / config.contrastive_logits_temperature
        logits = torch.cat([logits[..., :1], logits[..., 1:].masked_fill(same, float("-inf"))], dim=-1)
        losses = logits.logsumexp(-1) - logits[..., 0]
        contrastive = (losses * mask).sum() / mask.sum()
        count = config.num_codevectors_per_group * config.num_codevector_groups
        return contrastive + config.diversity_loss_weight * (count - perplexity) / count

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        config = getattr(model, "config", None)
        if not hasattr(model, "quantizer"):
            raise ValueError(f"{type(model).__name__} has no quantizer; use Wav2Vec2ForPreTraining")
        if model.training and getattr(config, "layerdrop", 0) > 0:
            raise ValueError(
                "the model decides in Python which layers it drops, which a captured step would repeat; "
                "set config.layerdrop = 0"
            )
        inner = cast("Wav2Vec2ForPreTraining", model)
        model_frames = int(inner._get_feat_extract_output_lengths(cast(torch.LongTensor, torch.tensor(self.samples))))
        frames = self.frames if self.frames is not None else frames_of(self.samples)
        if model_frames != frames:
            raise ValueError(f"the model makes {model_frames} frames of {self.samples} samples, not {frames}; "
                             f"set frames={model_frames}")  # fmt: skip


def quantized(quantizer: Wav2Vec2GumbelVectorQuantizer, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(code vectors (batch, frames, width), perplexity of their use) of features (batch, frames, channels).

    As `Wav2Vec2GumbelVectorQuantizer`, but its Gumbel noise is drawn by torch.rand, and so is a function of the global
    position in a captured step.
    """
    groups, choices = quantizer.num_groups, quantizer.num_vars
    logits = (
        quantizer.weight_proj(features).unflatten(-1, (groups, choices)).float()
    )  # (batch, frames, groups, choices)
    soft = logits.softmax(-1)
    if quantizer.training:
        uniform = torch.rand_like(logits).clamp(min=1e-20)
        tempered = ((logits - (-uniform.log()).clamp(min=1e-20).log()) / quantizer.temperature).softmax(-1)
    else:
        tempered = soft
    hard = F.one_hot(tempered.argmax(-1), choices).to(soft.dtype)
    chosen = hard + tempered - tempered.detach() if quantizer.training else hard
    used = (soft if quantizer.training else hard) * mask[..., None, None]
    share = used.sum((0, 1)) / mask.sum()
    perplexity = (-torch.xlogy(share, share).sum(-1)).exp().sum()
    books = quantizer.codevectors.view(groups, choices, -1)
    codes = torch.einsum("bfgc,gcw->bfgw", chosen.to(books.dtype), books)
    return codes.flatten(-2), perplexity


def frames_of(samples: int) -> int:
    """Frames that wav2vec 2 makes: kernels 10, 3, 3, 3, 3, 2, 2 and strides 5, 2, 2, 2, 2, 2, 2.

    >>> frames_of(16_000)
    49
    """
    for kernel, stride in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
        samples = (samples - kernel) // stride + 1
    return samples
