"""From pre-training to distributed inference: an encoder-decoder in the style of PanGu-beta on a language of reviews.

1. The encoder learns the language by masked language modelling (15 % of the tokens).
2. Multi-task fine-tuning: one encoder learns sentiment and topic together, then each task alone; beside it, each task
   is learned alone from the start.
3. PET with few labels: cloze questions to the pre-trained encoder, against a classifier with a new head.
4. Encoder and decoder learn to write a verdict about a review. The trained model then runs on one device and on two
   virtual devices, which must give the same outputs.

    python runs/pangu_beta.py                  # about five minutes on two cores
    python runs/pangu_beta.py --quick          # seconds; the model learns little
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support import Results, arguments, curve, options, picture, train

import tutti
from tutti.data.reviews import Reviews
from tutti.data.tokenizer import train_wordpiece
from tutti.models.pangu_beta import (
    PanGuBetaConfig,
    PanGuBetaForConditionalGeneration,
    PanGuBetaForMaskedLM,
    PanGuBetaForSequenceClassification,
)
from tutti.train.multitask import MultiTaskModel, mixed
from tutti.train.pet import Cloze, pet
from tutti.train.tasks import get_task

LENGTH = 48
LANGUAGE = Reviews()
TASKS = {"sentiment": ("label", 2), "topic": ("topic", LANGUAGE.topics)}  # name -> column and classes
CLOZES = [
    Cloze("{text} , so {mask} !", {0: ["bad", "awful", "poor"], 1: ["good", "great", "fine"]}, LENGTH),
    Cloze("{text} , {mask} !", {0: ["bad", "awful", "poor"], 1: ["good", "great", "fine"]}, LENGTH),
]


def make_config(tokenizer: Any, quick: bool) -> PanGuBetaConfig:
    width, layers = (32, 1) if quick else (96, 3)
    return PanGuBetaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_decoder_layers=layers, num_attention_heads=4, max_position_embeddings=LENGTH,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.sep_token_id,
        decoder_start_token_id=tokenizer.cls_token_id,
    )  # fmt: skip


def features(rows: list[dict[str, Any]], tokenizer: Any, column: str) -> list[dict[str, Any]]:
    """Tokens of reviews, padded to one length, and their labels."""
    given = tokenizer([row["text"] for row in rows], truncation=True, max_length=LENGTH, padding="max_length")
    return [{"input_ids": ids, "attention_mask": mask, "labels": row[column]}
            for ids, mask, row in zip(given["input_ids"], given["attention_mask"], rows, strict=True)]  # fmt: skip


def accuracy(model: Any, data: list[dict[str, Any]], run: Any, task: int | None = None) -> float:
    """Fraction of rows whose label the model finds. task: its number, for a model of several tasks."""
    rows = data if task is None else [{**row, "task": task} for row in data]
    args = arguments(run, "scratch", 1, 1e-3, 32, per_device_eval_batch_size=50, remove_unused_columns=False)
    made = tutti.Trainer(model, args).predict(rows)
    return float((np.argmax(made.predictions, -1) == made.label_ids).mean())


def classifier(encoder: PanGuBetaForMaskedLM, classes: int) -> PanGuBetaForSequenceClassification:
    """A new head over a copy of a trained encoder."""
    torch.manual_seed(1)
    config = PanGuBetaConfig(**{**encoder.config.to_dict(), "num_labels": classes})
    made = PanGuBetaForSequenceClassification(config)
    made.model.load_state_dict(encoder.model.state_dict())
    return made


def multi_task(encoder: Any, tokenizer: Any, run: Any, steps: int, rows: int) -> dict[str, Any]:
    """Accuracies: each task alone; both together; both together, then each alone."""
    trained = {name: features(LANGUAGE.rows(rows, 10 + i), tokenizer, column)
               for i, (name, (column, _)) in enumerate(TASKS.items())}  # fmt: skip
    held_out = {name: features(LANGUAGE.rows(rows // 2, 20), tokenizer, column) for name, (column, _) in TASKS.items()}
    torch.manual_seed(1)
    both = MultiTaskModel(encoder, {name: classes for name, (_, classes) in TASKS.items()})
    args = arguments(run, "multi", steps, 1e-3, 16, remove_unused_columns=False)
    trainer = tutti.Trainer(both, args, train_dataset=mixed(trained, both))
    train(trainer)
    found: dict[str, Any] = {"together": {}, "together, then alone": {}, "alone": {}}
    for name, (_, classes) in TASKS.items():
        found["together"][name] = accuracy(both, held_out[name], run, both.number(name))
        for way, model in (("together, then alone", both.single(name)), ("alone", classifier(encoder, classes))):
            args = arguments(run, f"{way.replace(', ', '-').replace(' ', '-')}-{name}", steps // 2, 5e-4, 16)
            train(tutti.Trainer(model, args, train_dataset=trained[name]))
            found[way][name] = accuracy(model, held_out[name], run)
    return found


def few_shot(encoder: Any, tokenizer: Any, run: Any, steps: int, shots: int, seeds: int) -> dict[str, Any]:
    """Accuracy of PET and of a new head, with `shots` labelled reviews, for several draws of these."""
    held_out = features(LANGUAGE.rows(500, 20), tokenizer, "label")
    found: dict[str, Any] = {"shots": shots, "PET": [], "new head": []}
    for seed in range(seeds):
        rows, unlabelled = LANGUAGE.rows(shots, 100 + seed), LANGUAGE.rows(300, 200 + seed)
        torch.manual_seed(seed)
        args = arguments(run, f"pet-{seed}", steps, 3e-4, 8, save_strategy="no")
        distill = arguments(run, f"pet-{seed}", 3 * steps, 1e-3, 16, save_strategy="no")
        made = pet(encoder, tokenizer, rows, unlabelled, CLOZES, args, distill=distill)
        found["PET"].append(accuracy(made.classifier, held_out, run))
        head = classifier(encoder, 2)
        args = arguments(run, f"head-{seed}", 3 * steps, 1e-3, 8, save_strategy="no")
        tutti.Trainer(head, args, train_dataset=features(rows, tokenizer, "label")).train()
        found["new head"].append(accuracy(head, held_out, run))
    return found


def pairs(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A review, and a verdict about it: praise or blame, and the first thing that it names of its topic."""
    made = []
    for row in rows:
        things = {LANGUAGE.noun(int(row["topic"]), i) for i in range(LANGUAGE.nouns)}
        thing = next(word for word in str(row["text"]).split() if word in things)
        made.append({"source": row["text"], "target": f"{'good' if row['label'] else 'bad'} {thing}"})
    return made


@dataclass(frozen=True)
class Pairs:
    """Batches of reviews and verdicts, padded to one length.

    Labels begin behind the tokenizer's first token, with which the decoder starts.
    """

    tokenizer: Any

    def __call__(self, rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        options = {"truncation": True, "padding": "max_length", "return_tensors": "pt"}
        given = self.tokenizer([row["source"] for row in rows], max_length=LENGTH, **options)
        labels = self.tokenizer([row["target"] for row in rows], max_length=9, **options)["input_ids"][:, 1:]
        labels = labels.masked_fill(labels == self.tokenizer.pad_token_id, -100)
        return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], "labels": labels}


@torch.no_grad()
def written(model: Any, tokenizer: Any, texts: list[str], tokens: int, cluster: str, plan: str) -> tuple[Any, Any]:
    """Greedy decoding on the devices of a cluster: (tokens (rows, tokens), logits of the last pass)."""
    batch = tokenizer(texts, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt")
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    given["decoder_input_ids"] = torch.full((len(texts), tokens), tokenizer.pad_token_id)
    given["decoder_input_ids"][:, 0] = tokenizer.cls_token_id
    model.eval()

    def forward(x: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**x, use_cache=False).logits

    function = tutti.function(torch.no_grad()(forward), given, store=tutti.Store(model=model), cluster=cluster,
                              plan=plan, level="O0")  # fmt: skip
    logits = torch.empty(0)
    for i in range(1, tokens):
        logits = function(given)
        ids = given["decoder_input_ids"].clone()
        ids[:, i] = logits[:, i - 1].argmax(-1)
        given = given | {"decoder_input_ids": ids}
    return given["decoder_input_ids"], logits


def inference(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Fraction of verdicts that are right, and differences of two virtual devices from one."""
    texts = [row["source"] for row in rows]
    ids, logits = written(model, tokenizer, texts, 8, "cpu:1", "dp1")
    made = [" ".join(x.split("[SEP]")[0].split()) for x in tokenizer.batch_decode(ids[:, 1:])]
    found: dict[str, Any] = {"right": sum(a == b["target"] for a, b in zip(made, rows, strict=True)) / len(rows)}
    for plan in ("dp2", "tp2"):
        others, told = written(model, tokenizer, texts, 8, "cpu:2", plan)
        found[plan] = {"same tokens": bool(torch.equal(ids, others)),
                       "largest difference of logits": (told - logits).abs().max().item()}  # fmt: skip
    found["example"] = {"review": texts[0], "verdict": made[0]}
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__, "out/pangu_beta", argv)
    results, quick = Results(run.out), run.quick
    corpus = LANGUAGE.rows(300 if quick else 12000, 1, verdicts=0.8)
    tokenizer = train_wordpiece([str(row["text"]) for row in corpus], 300 if quick else 600)
    config = make_config(tokenizer, quick)

    torch.manual_seed(0)
    encoder = PanGuBetaForMaskedLM(config)
    task = get_task("masked-lm", length=LENGTH, buckets=[LENGTH])
    args = arguments(run, "pretrained", 6 if quick else 2200, 1.5e-3, 32)
    trainer = tutti.Trainer(encoder, args, train_dataset=corpus, eval_dataset=LANGUAGE.rows(100, 2, verdicts=0.8),
                            processing_class=tokenizer, task=task)  # fmt: skip
    losses = {"masked-LM": train(trainer)}
    results.get("masked-LM", lambda: {"held-out loss": trainer.evaluate()["eval_loss"]})
    results.show("masked-LM")

    steps, rows = (4, 40) if quick else (200, 1000)
    results.get("multi-task", lambda: multi_task(encoder, tokenizer, run, steps, rows))
    results.show("multi-task")
    results.get("few-shot", lambda: few_shot(encoder, tokenizer, run, *((2, 8, 1) if quick else (30, 16, 2))))
    results.show("few-shot")

    torch.manual_seed(0)
    model = PanGuBetaForConditionalGeneration(config)
    model.load_state_dict(encoder.state_dict(), strict=False)
    args = arguments(run, "writer", 6 if quick else 400, 1e-3, 32, remove_unused_columns=False)
    trainer = tutti.Trainer(model, args, Pairs(tokenizer), pairs(corpus))
    losses["writer"] = train(trainer)
    trainer.save_model(str(run.out / "model"))
    held_out = pairs(LANGUAGE.rows(8 if quick else 100, 3))
    found = results.get("inference", lambda: inference(model, tokenizer, held_out))
    results.show("inference")

    def bars(axes: Any) -> None:
        shots = results.values["few-shot"]
        axes.bar(["PET", "new head"], [np.mean(shots[x]) for x in ("PET", "new head")])
        axes.set_ylabel(f"accuracy with {shots['shots']} labels")

    picture(run.out, {"losses": lambda axes: curve(axes, losses), "few labels": bars})
    assert all(found[plan]["same tokens"] for plan in ("dp2", "tp2")), "plans changed the outputs"
    return results.values


if __name__ == "__main__":
    main()
