"""Log-probabilities of the reference model on the data, computed once before training.

The reference is the model before it is trained, or without its adapters, or another model. Its log-probabilities are
constants, so no second copy of the model is in memory while it trains. They are saved beside the checkpoints, for a run
that resumes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tutti
from tutti.align.arguments import is_adapted, without_dropout
from tutti.align.sequences import flat, model_logprobs
from tutti.checkpoint.tensor_file import read_metadata, read_tensors, write_tensors
from tutti.data.rows import Rows
from tutti.launch.launch import rank
from tutti.launch.progress import progress
from tutti.train.trainer.arguments import option


class WithReference(Rows):
    """Rows, and what the reference says of each: `reference`."""

    def __init__(self, rows: Any, values: Tensor):
        self.rows, self.values = rows, values

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        return {**self.rows[i], "reference": self.values[i]}

    def name(self, i: int) -> str:
        return self.rows.name(i)


class Referenced:
    """A mixin of trainers on pairs of sequences: adds `reference` to rows before training begins.

    ref_model: the reference; None: the model before training, without its adapters if it has some. Trainers define
    `reference_batch(rows)`, which collates rows without a reference.
    """

    ref_model: nn.Module | None = None
    args: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any

    def reference_batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of some features, without what the reference says."""
        raise NotImplementedError

    def pair_logprobs(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """The log-probabilities of what is learned of both sequences of each row, (rows, 2) float32."""
        return model_logprobs(model, flat(batch)).sum(1).unflatten(0, (-1, 2))

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train. The reference is computed before: see `tutti.Trainer.train`."""
        resumes = self.checkpoints.find(resume_from_checkpoint) is not None  # pyright: ignore
        self.train_dataset = self.referenced(self.train_dataset, "train", resumes)
        self.eval_dataset = self.referenced(self.eval_dataset, "eval", resumes)
        return super().train(resume_from_checkpoint, **options)  # pyright: ignore

    def held_out(self, dataset: Any) -> Any:
        """The features of a dataset to evaluate, with their reference: see `AlignTrainer.held_out`."""
        dataset = None if dataset is self.eval_dataset else dataset
        if dataset is None or isinstance(dataset, str):
            self.eval_dataset = self.referenced(self.eval_dataset, "eval", False)
        return self.referenced(super().held_out(dataset), "more", False)  # pyright: ignore

    def referenced(self, rows: Any, name: str, resumes: bool) -> Any:
        """Rows with `reference`. Raises ValueError if the reference is gone: the model has been trained since."""
        if rows is None or isinstance(rows, WithReference):
            return rows
        if isinstance(rows, dict):
            return {key: self.referenced(x, f"{name}-{key}", resumes) for key, x in rows.items()}
        path = Path(self.args.output_dir, f"reference-{name}.safetensors")
        trained = self.ref_model is None and not is_adapted(self.model) and (resumes or self.state.global_step > 0)  # pyright: ignore
        if trained:
            return WithReference(rows, self._read(path, rows))
        values, digest = self._computed(rows)
        if rank() == 0:
            write_tensors({"values": values}, path, {"format": "pt", "rows": digest})
        return WithReference(rows, values)

    def _read(self, path: Path, rows: Any) -> Tensor:
        if path.exists() and read_metadata(path).get("rows") == self._digest(rows):
            return read_tensors(path, unsigned=True)["values"]
        raise ValueError(f"the reference is the model before training, which has been trained since, and {path} has no "
                         "log-probabilities of these rows: give ref_model")  # fmt: skip

    def _digest(self, rows: Any) -> str:
        """A digest of all rows, as they are tokenized."""
        digest = hashlib.sha256()
        with progress("comparing rows with those of the reference") as tell:
            for i in range(len(rows)):
                digest.update(_bytes(rows[i]))
                tell.count(i + 1, len(rows))
        return digest.hexdigest()

    @torch.no_grad()
    def _computed(self, rows: Any) -> tuple[Tensor, str]:
        """The log-probabilities of the reference, (rows, 2), and the digest of the rows."""
        model: Any = self.model if self.ref_model is None else self.ref_model
        args = self.args
        if self.ref_model is not None:
            without_dropout(self.ref_model)
        size, logprobs = args.per_device_eval_batch_size, []
        without = model.disable_adapter() if self.ref_model is None and is_adapted(model) else nullcontext()
        was = model.training
        score, digest = None, hashlib.sha256()
        with without, progress("computing the reference") as tell, self.counting_cuts(len(rows)):  # pyright: ignore
            model.eval()
            for at in range(0, len(rows), size):
                chosen = [rows[i] for i in range(at, min(at + size, len(rows)))]
                batch = self.reference_batch(chosen)
                score = score or tutti.function(
                    lambda batch: self.pair_logprobs(model, batch), batch, store=tutti.Store(model=model),
                    plan=option(args, "plan"), cluster=option(args, "cluster"), seed=args.seed,
                )  # fmt: skip
                logprobs.append(score(batch).float())
                for row in chosen:
                    digest.update(_bytes(row))
                tell.count(at + len(chosen), len(rows))
            model.train(was)
        return torch.cat(logprobs), digest.hexdigest()


def _bytes(row: Mapping[str, Any]) -> bytes:
    return repr(sorted(row.items())).encode()
