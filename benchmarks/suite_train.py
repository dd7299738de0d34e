"""`tutti.Trainer` beside `transformers.Trainer`: loss curves, metrics, speed and memory of four tasks, in turns.

Both train the same model from the same weights on the same rows in the same order, with the same `TrainingArguments`
(AdamW, gradient clipping, a linear schedule; float32, and bfloat16 by autocast), each in a process of its own; one
waits while the other works.
Causal language modelling, masked language modelling and span corruption read Python's standard library, byte by byte;
image classification reads scikit-learn's digits. Dropout is off, so that the losses can be compared step by step.
By task:

- `speed`: tokens (images) per second of ours over those of transformers, median over turns after the first.
- `peak memory`: ours over theirs, of the resident memory of the whole process; `megabytes`: theirs and ours.
- `largest difference`: of the losses of a step, relative, over all steps.
- `loss`, `metric`: on held-out rows after training.
"""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

import harness

SEQ, BYTES, MASK, SPAN = 128, 256, 256, 3
PRECISIONS = ("float32", "bf16")  # bf16: `TrainingArguments(bf16=True)`, autocast
TURN, STEPS, QUICK_STEPS = 20, 200, 40


def text(rows: int) -> torch.Tensor:
    """Windows of the standard library's source code, (rows, SEQ) int64: bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = np.frombuffer(b"".join(x.read_bytes() for x in files), dtype=np.uint8)
    starts = np.random.default_rng(0).permutation(len(source) // SEQ)[:rows] * SEQ
    return torch.from_numpy(source[starts[:, None] + np.arange(SEQ)].astype(np.int64))


def causal(rows: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": x, "labels": x.clone()} for x in text(rows)]


def masked(rows: int) -> list[dict[str, torch.Tensor]]:
    examples, draw = [], torch.Generator().manual_seed(0)
    for x in text(rows):
        chosen = torch.rand(SEQ, generator=draw) < 0.15
        examples.append({"input_ids": x.masked_fill(chosen, MASK), "labels": x.masked_fill(~chosen, -100),
                         "attention_mask": torch.ones_like(x)})  # fmt: skip
    return examples


def spans(rows: int) -> list[dict[str, torch.Tensor]]:
    """Every 20th to 22nd byte is left out of the input, and is the target."""
    examples = []
    for x in text(rows):
        gone = torch.arange(SEQ) % 20 < SPAN
        examples.append({"input_ids": x[~gone] + 3, "labels": x[gone] + 3})
    return examples


def digits(rows: int) -> list[dict[str, Any]]:
    from sklearn.datasets import load_digits

    dataset: Any = load_digits()
    images = torch.nn.functional.interpolate(
        torch.tensor(dataset.images, dtype=torch.float32)[:, None] / 16, scale_factor=4
    )
    order = np.random.default_rng(0).permutation(len(images))[:rows]
    return [{"pixel_values": images[i], "labels": int(dataset.target[i])} for i in order]


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=BYTES, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=SEQ))  # fmt: skip


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=BYTES + 1, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=SEQ, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))  # fmt: skip


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=BYTES + 3, d_model=256, d_ff=1024, d_kv=64, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0))  # fmt: skip


def vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        image_size=32, patch_size=4, num_channels=1, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, num_labels=10))  # fmt: skip


TASKS: dict[str, tuple[Callable[[], Any], Callable[[int], list], int, float]] = {  # model, rows, tokens of a row, lr
    "causal LM": (llama, causal, SEQ, 1e-3),
    "masked LM": (bert, masked, SEQ, 3e-4),
    "T5": (t5, spans, SEQ, 1e-3),
    "ViT": (vit, digits, 1, 3e-4),
}
BATCH, HELD_OUT = 16, 128


def accuracy(prediction: Any) -> dict[str, float]:
    """The accuracy over the labels that count."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    best, labels = logits.argmax(-1), prediction.label_ids
    counts = labels != -100
    return {"accuracy": float((best == labels)[counts].mean())}


class Pace(TrainerCallback):
    """Lets `steps` steps run in each turn, and times them."""

    def __init__(self, turns: harness.Turns):
        self.turns, self.left, self.seconds = turns, 0, []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.left, self.begin = self.turns.wait(), time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.begin)
        self.left -= 1
        if self.left == 0 and state.global_step < state.max_steps:
            self.turns.done(self.seconds)
            self.seconds, self.left = [], self.turns.wait()
        self.begin = time.perf_counter()


def work(turns: harness.Turns, whose: str, task: str, steps: int, bf16: bool) -> None:
    make, rows, _, rate = TASKS[task]
    torch.set_num_threads(2)
    if whose == "tutti":
        from tutti import Trainer
    else:
        from transformers import Trainer
    data = rows(steps * BATCH // 2 + HELD_OUT)
    torch.manual_seed(0)
    pace = Pace(turns)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, max_steps=steps,
            learning_rate=rate, weight_decay=0.1, warmup_steps=10, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, bf16=bf16,
        )  # fmt: skip
        args.level = "O2"  # of tutti.Trainer: compiled from the first step on
        trainer: Any = Trainer(make(), args, train_dataset=data[HELD_OUT:], eval_dataset=data[:HELD_OUT],
                               compute_metrics=accuracy, callbacks=[pace])  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        metrics = trainer.evaluate()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    turns.done(pace.seconds, losses=losses, loss=metrics["eval_loss"], accuracy=metrics["eval_accuracy"])  # pyright: ignore
    turns.wait()


def compared(task: str, steps: int, bf16: bool) -> dict[str, Any]:
    both = [harness.Process(whose, work, whose, task, steps, bf16) for whose in ("transformers", "tutti")]
    seconds: dict[str, list[float]] = {x.name: [] for x in both}
    rounds = steps // TURN
    for i in range(rounds):
        for contender in both if i % 2 else both[::-1]:
            times = contender.turn(TURN)
            if i:  # the first turn captures, plans and compiles
                seconds[contender.name].append(statistics.median(times))
    theirs, ours = (x.facts for x in both)
    for x in both:
        x.close()
    figures: dict[str, Any] = {
        "speed": statistics.median(a / b for a, b in zip(seconds["transformers"], seconds["tutti"], strict=True)),
        "peak memory": ours["peak_rss_bytes"] / theirs["peak_rss_bytes"],
        "megabytes": [x["peak_rss_bytes"] / 1e6 for x in (theirs, ours)],
        "largest difference": max(abs(a - b) / a for a, b in zip(theirs["losses"], ours["losses"], strict=True)),  # pyright: ignore
        "loss": [theirs["loss"], ours["loss"]],
        "accuracy": [theirs["accuracy"], ours["accuracy"]],
        "milliseconds": [1e3 * statistics.median(seconds[x.name]) for x in both],
    }
    harness.say(f"{task}, {PRECISIONS[bf16]}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    return figures


def run(quick: bool) -> dict[str, Any]:
    steps = QUICK_STEPS if quick else STEPS
    figures = {name: {task: compared(task, steps, name == "bf16") for task in TASKS} for name in PRECISIONS}
    return {"steps": steps, **figures}


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])
