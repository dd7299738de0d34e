"""Training speed on one CPU: tutti against transformers.Trainer on the same Llama, in turns.

All contenders train the same model from the same weights on the same random tokens with AdamW and gradient
clipping, and must agree on the first loss. A step is everything from batch to updated weights.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import harness
import tutti

LR, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 1.0


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    sequence: int
    batch: int
    rounds: int
    steps: int

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=self.sequence,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.sequence


FULL = Case(512, 8, 8, 1408, 8192, sequence=256, batch=8, rounds=6, steps=3)
QUICK = Case(256, 2, 4, 704, 4096, sequence=128, batch=4, rounds=3, steps=3)


class RandomTokens(Dataset):
    """Sequences of random tokens, a function of their index."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.case.vocab, (self.case.sequence,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def train_with_trainer(turns: harness.Turns, case: Case, arguments: dict[str, Any]) -> None:
    """``transformers.Trainer`` inside one long ``train()``, which waits between turns."""
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=case.batch,
            max_steps=1 << 19,
            learning_rate=LR,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP_NORM,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **arguments,
        )
        pace = Pace(turns)
        trainer = pace.trainer = InOrder(case.model(), options, train_dataset=RandomTokens(case), callbacks=[pace])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class Pace(TrainerCallback):
    """Times each step from the end of the one before to its own end, data loading included."""

    def __init__(self, turns: harness.Turns) -> None:
        self.turns, self.left, self.seconds, self.first_loss = turns, 0, [], float("nan")
        self.trainer: Trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.left, self.start = self.turns.wait(), time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        if state.global_step == 1:
            self.first_loss = self.trainer._tr_loss.item()
        self.left -= 1
        if self.left == 0:
            self.turns.done(self.seconds, first_loss=self.first_loss)
            self.left, self.seconds = self.turns.wait(), []
        control.should_training_stop = self.left == 0
        self.start = time.perf_counter()


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train_with_tutti(turns: harness.Turns, case: Case, level: str, dtype: torch.dtype) -> None:
    """``tutti.parallelize`` on one device; low precision with float32 masters."""
    model = case.model().to(dtype)
    model.config.use_cache = True  # transformers then leaves causality to the kernel; the capture drops the cache
    batches = iter(DataLoader(RandomTokens(case), batch_size=case.batch))
    first = next(batches)
    batches = itertools.chain([first], batches)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    step = tutti.parallelize(model, optimizer, first, level=level, clip_norm=CLIP_NORM, masters=dtype != torch.float32)
    first_loss = None
    while steps := turns.wait():
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = step(next(batches))
            seconds.append(time.perf_counter() - start)
            first_loss = first_loss or loss.item()
        turns.done(seconds, first_loss=first_loss)


def run(quick: bool) -> dict[str, Any]:
    case = QUICK if quick else FULL
    trainer, bf16, float32 = train_with_trainer, torch.bfloat16, torch.float32
    peers = [
        harness.Process("Trainer float32", trainer, case, {"bf16": False}),
        harness.Process("Trainer bf16", trainer, case, {"bf16": True}),
        harness.Process("Trainer bf16 compiled", trainer, case, {"bf16": True, "torch_compile": True}),
    ]
    ours = [
        harness.Process("tutti float32 O0", train_with_tutti, case, "O0", float32),
        harness.Process("tutti bf16 O2", train_with_tutti, case, "O2", bf16),
    ]
    if not quick:
        ours.append(harness.Process("tutti float32 O2", train_with_tutti, case, "O2", float32))
        ours.append(harness.Process("tutti bf16 O0", train_with_tutti, case, "O0", bf16))
    contenders = [*ours, *peers]
    times = harness.take_turns(contenders, case.rounds, case.steps)
    for contender in contenders:
        contender.close()
    losses = {contender.name: contender.facts["first_loss"] for contender in contenders}
    if max(losses.values()) - min(losses.values()) > 0.01 * min(losses.values()):
        raise RuntimeError(f"the contenders do not train the same model: first losses {losses}")
    peaks = {contender.name: contender.facts["peak_rss_bytes"] for contender in contenders}
    figures = {}
    for name, seconds in times.items():
        figures[name] = {
            "tokens_per_second": case.tokens / harness.summary(seconds)["median"],
            "seconds_per_step": harness.summary(seconds),
            "first_loss": losses[name],
            "peak_rss_bytes": peaks[name],
        }
    best = harness.ratio(times, [c.name for c in ours], [c.name for c in peers])
    harness.say(f"{best['ours']} is {best['times_faster']:.2f} x as fast as {best['peer']}")
    return {"case": vars(case), "contenders": figures, "ratio": best}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers", "accelerate"))
