"""Training speed on one CPU: tutti against transformers.Trainer on the same Llama, in turns.

All contenders train the same model from the same weights on the same random tokens with AdamW and gradient
clipping, and must agree on the first loss. A step is everything from batch to updated weights.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
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


class Peer(TrainerCallback):
    """``transformers.Trainer`` inside one long ``train()``, which waits between turns.

    A step is timed from the end of the one before to its own end, data loading included. accelerate keeps its
    settings (precision, compilation) in dicts that all Trainers of a process share: each gets its own here.
    """

    def __init__(self, name: str, case: Case, **arguments: Any) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.first_loss = float("nan")
        self._left = 0
        self._closed = False
        self._error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._folder = tempfile.TemporaryDirectory()
        self._shared = [(state, {}) for state in (PartialState, AcceleratorState, GradientState)]
        self._enter()
        options = TrainingArguments(
            self._folder.name,
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
        self._trainer = _InOrder(case.model(), options, train_dataset=RandomTokens(case), callbacks=[self])
        self._trainer.remove_callback(PrinterCallback)  # stdout is for the result
        self._thread = threading.Thread(target=self._train, args=(torch.get_num_threads(),), daemon=True)
        self._thread.start()

    def turn(self, steps: int) -> list[float]:
        self._left, self.seconds = steps, []
        self._enter()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self.seconds

    def close(self) -> None:
        self._closed, self._left = True, 1
        self._enter()
        self._go.release()
        self._thread.join()
        self._folder.cleanup()

    def _enter(self) -> None:
        for state, shared in self._shared:
            state._shared_state = shared
        for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
            del os.environ[key]

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        if state.global_step == 1:
            self.first_loss = self._trainer._tr_loss.item()
        self._left -= 1
        if self._left == 0:
            self._done.release()
            self._go.acquire()
        control.should_training_stop = self._closed
        self._start = time.perf_counter()

    def _train(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a setting of each thread
        self._go.acquire()
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
            self._done.release()


class _InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Ours:
    """``tutti.parallelize`` on one device."""

    def __init__(self, name: str, case: Case, level: str, dtype: torch.dtype = torch.float32) -> None:
        self.name = name
        self.first_loss = float("nan")
        model = case.model().to(dtype)
        self._batches = iter(DataLoader(RandomTokens(case), batch_size=case.batch))
        first = next(self._batches)
        self._batches = itertools.chain([first], self._batches)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR)
        masters = dtype != torch.float32
        self._step = tutti.parallelize(
            model, optimizer, first, cluster="auto", level=level, clip_norm=CLIP_NORM, masters=masters
        )

    def turn(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = self._step(next(self._batches))
            seconds.append(time.perf_counter() - start)
            if self.first_loss != self.first_loss:
                self.first_loss = loss.item()
        return seconds

    def close(self) -> None:
        pass


def run(quick: bool) -> dict[str, Any]:
    case = QUICK if quick else FULL
    bf16 = torch.bfloat16
    peers = [
        Peer("Trainer float32", case, bf16=False),
        Peer("Trainer bf16", case, bf16=True),
        Peer("Trainer bf16 compiled", case, bf16=True, torch_compile=True),
    ]
    ours = [Ours("tutti float32 O0", case, "O0"), Ours("tutti bf16 O2", case, "O2", bf16)]
    if not quick:
        ours += [Ours("tutti float32 O2", case, "O2"), Ours("tutti bf16 O0", case, "O0", bf16)]
    contenders = [*ours, *peers]
    times = harness.take_turns(contenders, case.rounds, case.steps)
    for contender in contenders:
        contender.close()
    losses = {contender.name: contender.first_loss for contender in contenders}
    if max(losses.values()) - min(losses.values()) > 0.01 * min(losses.values()):
        raise RuntimeError(f"the contenders do not train the same model: first losses {losses}")
    figures = {}
    for name, seconds in times.items():
        figures[name] = {
            "tokens_per_second": case.tokens / harness.summary(seconds)["median"],
            "seconds_per_step": harness.summary(seconds),
            "first_loss": losses[name],
        }
    best = harness.ratio(times, [c.name for c in ours], [c.name for c in peers])
    harness.say(f"{best['ours']} is {best['times_faster']:.2f} x as fast as {best['peer']}")
    return {"case": vars(case), "contenders": figures, "ratio": best}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers", "accelerate"))
