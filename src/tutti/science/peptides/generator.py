"""The language model of peptides with conditions: rows to train on, training, sampling, perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

import tutti
from tutti.checkpoint.model import load_model
from tutti.launch.progress import progress
from tutti.models.peptides import RESIDUES, PeptideConfig, PeptideForCausalLM
from tutti.science.peptides.conditions import OPEN, Conditions, condition_tokenizer, prefix
from tutti.train.stop import train_until_stopped
from tutti.train.trainer.counting import Counting

__all__ = ["Generator", "Training"]

Row = dict[str, list[int]]  # input_ids and labels
IGNORED = -100
COPIES = 4  # rows of a peptide: with all conditions, with none, and with some
CHUNK = 256  # peptides sampled at once


@dataclass(frozen=True)
class Training:
    """How a model is trained. batch: peptides in a step. The others are as in `tutti.TrainingArguments`."""

    steps: int
    learning_rate: float = 3e-3
    batch: int = 32
    weight_decay: float = 0.1
    cluster: str = "auto"
    plan: str = "auto"
    seed: int = 0


class Generator:
    """A model with its tokenizer, its conditions, and the longest peptide, in residues.

    model: a `PeptideForCausalLM`, in whose config `conditions` has the edges of bins.
    """

    def __init__(self, model: Any):
        self.model = model
        self.conditions = Conditions({name: tuple(x) for name, x in model.config.conditions.items()})
        self.longest = model.config.max_position_embeddings - len(self.conditions.edges) - 2
        self.tokenizer = condition_tokenizer(self.conditions)
        self.residues = set(self.tokenizer.convert_tokens_to_ids(list(RESIDUES)))

    @classmethod
    def create(cls, conditions: Conditions, longest: int, width: int = 96, layers: int = 3, heads: int = 4,
               dropout: float = 0.0, seed: int = 0) -> Generator:  # fmt: skip
        """With weights drawn from the seed."""
        torch.manual_seed(seed)
        edges: Any = {"conditions": conditions.edges}
        config = PeptideConfig(
            vocab_size=len(condition_tokenizer(conditions)), hidden_size=width, intermediate_size=4 * width,
            num_hidden_layers=layers, num_attention_heads=heads, dropout=dropout,
            max_position_embeddings=longest + len(conditions.edges) + 2, **edges,
        )  # fmt: skip
        return cls(PeptideForCausalLM(config))

    @classmethod
    def load(cls, folder: Path | str) -> Generator:
        """The model that `save` wrote, as in the folder `model` of a run. Raises ValueError for other models."""
        model = load_model(Path(folder))
        if not hasattr(model.config, "conditions"):
            raise ValueError(f"{folder} has a model without conditions; give the folder `model` of `tutti peptides`")
        return cls(model)

    def save(self, folder: Path | str) -> None:
        """As `save_pretrained` writes model and tokenizer."""
        transformers_logging.disable_progress_bar()
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    # --- training ---

    def rows(self, peptides: Sequence[str], bins: np.ndarray, drop: bool = True, seed: int = 0) -> list[Row]:
        """Tokens of peptides behind their conditions; labels leave out the conditions.

        bins: (peptides, properties). drop: four rows a peptide, one with all conditions, one with none, and two with
        each left open by half; else one with the bins as they are. Negative bins are open.
        """
        draw = np.random.default_rng(seed)
        rows = []
        for peptide, own in zip(peptides, bins, strict=True):
            masks = [np.zeros(len(own), bool)]
            if drop:
                masks += [np.ones(len(own), bool), *(draw.random((COPIES - 2, len(own))) < 0.5)]
            residues = [*self.tokenizer.convert_tokens_to_ids(list(peptide)), self.tokenizer.eos_token_id]
            for mask in masks:
                before = prefix(self.tokenizer, self.conditions, np.where(mask, OPEN, own))
                rows.append({"input_ids": before + residues, "labels": [IGNORED] * len(before) + residues})
        return rows

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """A batch, padded to the longest peptide there may be: every batch has one shape."""
        size = self.longest + len(self.conditions.edges) + 2
        filled = {"input_ids": self.tokenizer.pad_token_id, "labels": IGNORED}
        batch = {key: torch.tensor([x[key] + [value] * (size - len(x[key])) for x in rows])
                 for key, value in filled.items()}  # fmt: skip
        lengths = torch.tensor([len(x["input_ids"]) for x in rows])
        return batch | {"attention_mask": (torch.arange(size) < lengths[:, None]).long()}

    def train(self, rows: list[Row], folder: Path | str, training: Training, what: str,
              validation: list[Row] | None = None) -> dict[str, list[tuple[int, float]]]:  # fmt: skip
        """Train by `tutti.Trainer` with checkpoints in a folder; what is there goes on. Returns (step, loss) by name.

        validation: rows by whose loss the best of ten checkpoints is chosen; without them the last one is.
        Raises Interrupted at SIGINT or SIGTERM, once a checkpoint is saved.
        """
        steps, best = training.steps, validation is not None
        every = max(1, steps // 10)
        args = tutti.TrainingArguments(
            str(folder), max_steps=steps, learning_rate=training.learning_rate, warmup_steps=steps // 20,
            per_device_train_batch_size=training.batch, lr_scheduler_type="cosine", save_steps=every,
            save_total_limit=1, logging_steps=max(1, steps // 40), report_to="none", disable_tqdm=True, level="O0",
            eval_strategy="steps" if best else "no", eval_steps=every, load_best_model_at_end=best,
            metric_for_best_model="eval_loss" if best else None, weight_decay=training.weight_decay,
            cluster=training.cluster, plan=training.plan, use_cpu=not torch.cuda.is_available(), seed=training.seed,
        )  # fmt: skip
        trainer = tutti.Trainer(self.model, args, self.collate, rows, validation, processing_class=self.tokenizer)
        transformers_logging.disable_progress_bar()  # of saving a checkpoint
        resume = any(Path(folder).glob("checkpoint-*/trainer_state.json"))
        with progress(what) as tell:
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(Counting(tell.count))
            train_until_stopped(trainer, resume)
        history = trainer.state.log_history
        return {name: [(int(line["step"]), line[key]) for line in history if key in line]
                for name, key in {"training": "loss", "validation": "eval_loss"}.items()}  # fmt: skip

    # --- use ---

    @torch.no_grad()
    def sample(self, asked: Mapping[str, int], count: int, seed: int = 0, temperature: float = 1.0, top_k: int = 0,
               guidance: float = 1.0) -> list[str]:  # fmt: skip
        """Peptides; "" for a sample that is none: without an end, or with other tokens than amino acids.

        asked: property -> bin, as for `Conditions.target`; others are open.
        top_k: draw from so many most likely tokens only; 0: from all. guidance: 1, or more to follow the condition
        more closely: logits are those without it plus `guidance` times the difference (Ho and Salimans 2022).
        """
        before, free = (prefix(self.tokenizer, self.conditions, self.conditions.target(x)) for x in (asked, {}))
        options: dict[str, Any] = {}
        peptides: list[str] = []
        self.model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            while len(peptides) < count:
                size = min(CHUNK, count - len(peptides))
                first = torch.tensor([before] * size, device=self.model.device)
                if guidance != 1:
                    unconditioned = torch.tensor([free] * size, device=self.model.device)
                    options = {"guidance_scale": guidance, "negative_prompt_ids": unconditioned,
                               "negative_prompt_attention_mask": torch.ones_like(unconditioned)}  # fmt: skip
                ids = self.model.generate(
                    first, attention_mask=torch.ones_like(first), max_new_tokens=self.longest + 1, do_sample=True,
                    temperature=temperature, top_k=top_k, **options,
                )  # fmt: skip
                peptides += [self._peptide(row) for row in ids[:, len(before) :].tolist()]
        return peptides

    def _peptide(self, ids: list[int]) -> str:
        end = self.tokenizer.eos_token_id
        residues = ids[: ids.index(end)] if end in ids else []
        return self.tokenizer.decode(residues) if set(residues) <= self.residues else ""

    @torch.no_grad()
    def perplexity(self, peptides: Sequence[str], bins: np.ndarray) -> float:
        """exp of the mean negative log-likelihood of a residue or end, with bins (peptides, properties)."""
        self.model.eval()
        rows, total, count = self.rows(peptides, bins, drop=False), 0.0, 0
        for first in range(0, len(rows), CHUNK):
            batch = {k: x.to(self.model.device) for k, x in self.collate(rows[first : first + CHUNK]).items()}
            labels = batch["labels"][:, 1:]
            logits = self.model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                                             ignore_index=IGNORED, reduction="sum"))  # fmt: skip
            count += int((labels != IGNORED).sum())
        return math.exp(total / count)
