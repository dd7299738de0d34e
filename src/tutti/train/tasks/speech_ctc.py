"""Speech recognition by connectionist temporal classification (Graves et al. 2006)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.data.buckets import pad_to_bucket
from tutti.data.rows import BadRow
from tutti.train.tasks.language.text import stacked
from tutti.train.tasks.scores import IGNORED, arrays
from tutti.train.tasks.task import Task
from tutti.train.values import Outputs, Processor


@dataclass(frozen=True)
class SpeechCTC(Task):
    """Transcribe audio (Wav2Vec2ForCTC, HubertForCTC and others with `input_values`).

    audio: column of `{"array": (samples,) float32, "sampling_rate": Hz}`.
    text: column of transcripts.
    blank: the tokenizer's padding token, by which `metrics` reads paths.
    buckets: lengths in samples to which batches are padded; None: the longest of the batch.

    The processor has a `feature_extractor` and a `tokenizer` (`Wav2Vec2Processor`); the tokenizer's padding token is
    the blank. The loss is the mean over rows of the loss divided by the length of the transcript, as torch computes
    "mean". Rows whose transcript does not fit into their frames have no loss.
    """

    audio: str = "audio"
    text: str = "text"
    blank: int = 0
    buckets: Sequence[int] | None = None

    name = "speech-ctc"
    model_class = "AutoModelForCTC"

    def columns(self):
        return self.audio, self.text

    def texts(self):
        return (self.text,)

    def feature(self, row, processor):
        audio = row[self.audio]
        extractor = processor.feature_extractor
        if audio["sampling_rate"] != extractor.sampling_rate:
            raise BadRow(
                f"the audio has {audio['sampling_rate']} samples a second, the model {extractor.sampling_rate}; "
                f"open the source with sampling_rate={extractor.sampling_rate}"
            )
        extracted = extractor(np.asarray(audio["array"], np.float32), sampling_rate=audio["sampling_rate"])
        return {
            "input_values": extracted["input_values"][0],
            "labels": processor.tokenizer(row[self.text])["input_ids"],
        }

    def batch(self, features, processor):
        longest = max(len(f["input_values"]) for f in features)
        values, mask = np.zeros((2, len(features), longest), np.float32)
        for r, f in enumerate(features):
            values[r, : len(f["input_values"])], mask[r, : len(f["input_values"])] = f["input_values"], 1
        audio = {"input_values": torch.from_numpy(values), "attention_mask": torch.from_numpy(mask).long()}
        if self.buckets is not None:
            audio = pad_to_bucket(audio, self.buckets)
        longest = max(len(f["labels"]) for f in features)
        labels = stacked([f["labels"] for f in features], IGNORED)
        if self.buckets is not None:
            labels = F.pad(labels, (0, -longest % 16), value=IGNORED)
        return {**audio, "labels": labels}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The CTC loss, with the lengths as tensors: the model's own chooses labels by their values."""
        labels, inputs = batch["labels"], {k: v for k, v in batch.items() if k != "labels"}
        logits = model(**inputs).logits
        frames = model._get_feat_extract_output_lengths(batch["attention_mask"].sum(-1)).long()  # pyright: ignore
        present = labels != IGNORED
        log_probs = logits.float().log_softmax(-1).transpose(0, 1)  # (frames, batch, vocabulary)
        blank: int = model.config.pad_token_id  # pyright: ignore
        targets = labels.masked_fill(~present, 0)
        return F.ctc_loss(log_probs, targets, frames, present.sum(-1), blank, reduction="mean", zero_infinity=True)

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Logits (rows, frames, labels). Frames after the end of the audio are -100."""
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        frames = model._get_feat_extract_output_lengths(batch["attention_mask"].sum(-1)).long()  # pyright: ignore
        beyond = torch.arange(logits.shape[1], device=logits.device) >= frames[:, None]
        return {"logits": logits.masked_fill(beyond[..., None], IGNORED)}

    def decoded(self, logits: Outputs, processor: Processor) -> list[str]:
        """The text of the most likely label of each frame, repetitions and blanks removed."""
        return processor.tokenizer.batch_decode(self._paths(np.asarray(logits)))

    def _paths(self, logits: np.ndarray) -> np.ndarray:
        """The most likely label of each frame, blank where there is no audio."""
        return np.where((logits == IGNORED).all(-1), self.blank, logits.argmax(-1))

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`token_error_rate`: edits between the best path's tokens and the labels, for each token of the labels."""
        predictions, labels = arrays(prediction)
        paths = self._paths(predictions) if predictions.ndim == 3 else predictions
        pairs = [
            (_collapsed(path, self.blank), row[row != IGNORED].tolist())
            for path, row in zip(paths, labels, strict=True)
        ]
        return {"token_error_rate": error_rate(pairs)}

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        config = getattr(model, "config", None)
        if config is None:
            return
        if model.training and getattr(config, "apply_spec_augment", False) and (
            getattr(config, "mask_time_prob", 0) > 0 or getattr(config, "mask_feature_prob", 0) > 0
        ):  # fmt: skip
            raise ValueError(
                "the model draws its masks in numpy, which a captured step would repeat; "
                "set config.apply_spec_augment = False"
            )
        if model.training and getattr(config, "layerdrop", 0) > 0:
            raise ValueError(
                "the model decides in Python which layers it drops, which a captured step would repeat; "
                "set config.layerdrop = 0"
            )
        if config.pad_token_id != processor.tokenizer.pad_token_id:
            raise ValueError(
                f"the model's blank is {config.pad_token_id}, the tokenizer's padding token "
                f"{processor.tokenizer.pad_token_id}; set config.pad_token_id"
            )
        if self.blank != config.pad_token_id:
            raise ValueError(f"blank is {self.blank}, the model's is {config.pad_token_id}; set blank")
        if config.vocab_size < len(processor.tokenizer):
            raise ValueError(f"the tokenizer has {len(processor.tokenizer)} tokens, the model {config.vocab_size}")


def _collapsed(path: np.ndarray, blank: int) -> list[int]:
    """Labels of a path: repetitions joined, blanks left out."""
    starts = np.concatenate([[True], path[1:] != path[:-1]]) & (path != blank)
    return path[starts].tolist()


def error_rate(pairs: Sequence[tuple[Sequence[object], Sequence[object]]]) -> float:
    """Edits (Levenshtein) of all (made, wanted) pairs, for each wanted element. Of words: the word error rate."""
    return sum(_edits(a, b) for a, b in pairs) / max(1, sum(len(b) for _, b in pairs))


def _edits(a: Sequence[object], b: Sequence[object]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
