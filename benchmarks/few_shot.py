"""Few labels: pattern-exploiting training against a classification head, and multi-task training before a scarce task.

The texts are reviews in an artificial language with known labels (`tutti.data.reviews`). A small BERT learns the
language as a masked language model. Then, for each of several seeds, which choose the labelled rows and the new heads:

- PET (`tutti.train.pet`) and a classifier with a new head learn praise and blame from 16 and from 32 labelled reviews;
  PET also reads 300 reviews without labels.
- A classifier learns four classes (praise or blame, of the first or the last topics) from 48 labelled reviews: at once,
  and after multi-task training (`tutti.train.multitask`) on praise and blame and on topics, 1500 reviews each.

Accuracies are on 500 other reviews, as mean and standard deviation over the seeds.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import transformers

import harness
from tutti import Trainer, TrainingArguments
from tutti.data.reviews import VERDICTS, Reviews
from tutti.data.tokenizer import train_wordpiece
from tutti.train.multitask import MultiTaskModel, mixed
from tutti.train.pet import Cloze, SoftCollator, classifier_of, padded, pet
from tutti.train.tasks import get_task

SEEDS, SHOTS, SCARCE, TESTED, UNLABELLED, PLENTY = 5, (16, 32), 48, 500, 300, 1500
PRETRAINING, QUICK_PRETRAINING = 3000, 2200
CLOZES = [Cloze(pattern, dict(enumerate(VERDICTS)), 64) for pattern in ("{text} , {mask} !", "{text} : {mask} !")]


def arguments(steps: int, rate: float, batch: int, level: str = "O0", seed: int = 0) -> TrainingArguments:
    return TrainingArguments(
        tempfile.mkdtemp(), max_steps=steps, learning_rate=rate, global_batch_size=batch, seed=seed, warmup_steps=10,
        per_device_eval_batch_size=64, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no",
        logging_steps=500, plan="dp", level=level,
    )  # fmt: skip


def pretrained(language: Reviews, steps: int) -> tuple[Any, Any]:
    """A masked language model of the language, and its tokenizer."""
    texts = language.rows(6000, 1, verdicts=0.9)
    tokenizer = train_wordpiece((row["text"] for row in texts), 2000)  # pyright: ignore
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, initializer_range=0.05, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip
    task = get_task("masked-lm", length=64, probability=0.3, buckets=(32,))
    trainer = Trainer(model, arguments(steps, 3e-3, 64, "O2"), train_dataset=_Endless(texts, steps * 64), task=task,
                      processing_class=tokenizer)  # fmt: skip
    trainer.train()
    return model, tokenizer


class _Endless(list):
    """The rows again and again, so that each pass has other masks."""

    def __init__(self, rows: list, count: int):
        super().__init__(rows[i % len(rows)] for i in range(count))


def encoded(rows: Sequence[Any], tokenizer: Any, label: Any = None) -> list[dict[str, Any]]:
    ids = tokenizer([row["text"] for row in rows])["input_ids"]
    return [{"input_ids": x, "labels": (label or _label)(row)} for x, row in zip(ids, rows, strict=True)]


def _label(row: Any) -> int:
    return row["label"]


def _topic(row: Any) -> int:
    return row["topic"]


def _both(row: Any) -> int:
    return 2 * row["label"] + (row["topic"] >= 3)


def learned(model: Any, rows: list[dict[str, Any]], collator: Any, steps: int, seed: int, rate: float = 1e-3) -> Any:
    Trainer(model, arguments(steps, rate, 16, seed=seed), collator, rows).train()
    return model


def accuracy(model: Any, rows: list[dict[str, Any]], collator: Any) -> float:
    prediction = Trainer(model, arguments(1, 1e-3, 16), collator).predict(rows)
    return float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())  # pyright: ignore


class Mixed:
    """A collator of rows of several tasks."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = padded(features, self.tokenizer)
        return batch | {key: torch.tensor([x[key] for x in features]) for key in ("task", "labels")}


def run(quick: bool) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    language, seeds = Reviews(adjectives=24), 2 if quick else SEEDS
    model, tokenizer = pretrained(language, QUICK_PRETRAINING if quick else PRETRAINING)
    collate, tested = SoftCollator(tokenizer), language.rows(TESTED, 99)
    accuracies: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        accuracies.setdefault(name, []).append(value)
        harness.say(f"{name}: {value:.3f}")

    for seed in range(seeds):
        for shots in SHOTS:
            rows, others = language.rows(shots, 1000 + seed), language.rows(UNLABELLED, 2000 + seed)
            torch.manual_seed(seed)
            result = pet(model, tokenizer, rows, others, CLOZES, arguments(30, 5e-4, 16, seed=seed),
                         distill=arguments(120, 1e-3, 32, seed=seed))  # fmt: skip
            note(f"PET, {shots} labels", accuracy(result.classifier, encoded(tested, tokenizer), collate))
            head = learned(classifier_of(model, 2), encoded(rows, tokenizer), collate, 120, seed)
            note(f"head, {shots} labels", accuracy(head, encoded(tested, tokenizer), collate))
        scarce = encoded(language.rows(SCARCE, 3000 + seed), tokenizer, _both)
        test = encoded(tested, tokenizer, _both)
        alone = learned(classifier_of(model, 4), scarce, collate, 150, seed)
        note(f"single task, {SCARCE} labels", accuracy(alone, test, collate))
        several = MultiTaskModel(copy.deepcopy(model), {"praise": 2, "topic": language.topics})
        plenty = language.rows(PLENTY, 4000 + seed), language.rows(PLENTY, 5000 + seed)
        tasks = {"praise": encoded(plenty[0], tokenizer), "topic": encoded(plenty[1], tokenizer, _topic)}
        Trainer(several, arguments(400, 1e-3, 32, seed=seed), Mixed(tokenizer), mixed(tasks, several)).train()
        after = classifier_of(several.single("topic"), 4)
        note(f"multi-task first, {SCARCE} labels", accuracy(learned(after, scarce, collate, 150, seed), test, collate))
    return {
        "seeds": seeds,
        "accuracy": {key: {"mean": statistics.mean(x), "standard deviation": statistics.stdev(x), "each": x}
                     for key, x in accuracies.items()},
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])
