"""SFT, DPO and GRPO beside TRL: the same model, data and seeds; losses, speed and memory, in turns.

A Llama of 8 million parameters with random weights and a vocabulary of 8,192 reads Python's standard library. Both
train in float32 on two threads, each in a process of its own; one waits while the other works. TRL has its best
configuration for this machine: no gradient checkpointing, and the reference of DPO computed before training. By
algorithm:

- `largest difference`: of the losses of the first 20 steps, absolute (SFT and DPO, which draw nothing).
- `speed`: rows a second of ours over TRL's by processor time, median over steps after the first five; of GRPO, whole
  rounds of 64 completions of at most 64 tokens, generation included. `wall`: by the wall clock.
- `seconds`: of the wall clock of a step, ours and TRL's.
- `peak memory`: of the process, ours over TRL's. `megabytes`: ours and TRL's.
"""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

import harness

STEPS = {"SFT": 25, "DPO": 25, "GRPO": 10}
QUICK = {"SFT": 8}
TRL = "trl==1.16.0"
COMPARED, FIRST = 20, 5
ROWS = {"SFT": 8, "DPO": 4, "GRPO": 64}  # of a step


def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
        pad_token_id=1,
    ))  # fmt: skip


def tokenizer() -> Any:
    """A tokenizer learned from the library."""
    from tutti.data.tokenizer import train_tokenizer

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    tokens: Any = train_tokenizer((x.read_text(errors="replace") for x in files), 8192)
    return tokens


def texts(count: int, size: int) -> list[str]:
    """Pieces of the library, each from the beginning of a line."""
    pieces = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        pieces += ["".join(lines[i : i + size]) for i in range(0, len(lines) - size, 3 * size)]
    return pieces[:: max(1, len(pieces) // count)][:count]


def rows(kind: str, words: Any) -> list[dict[str, str]]:
    """Rows of a dataset. Tokens of a prompt and its completion are those of the prompt and more, as TRL takes them."""
    if kind == "SFT":
        return [{"text": x} for x in texts(400, 24)]
    if kind == "GRPO":
        return [{"prompt": x} for x in texts(64, 3)]
    halves = [(x[: len(x) // 2], x[len(x) // 2 :]) for x in texts(800, 12) if len(x) < 400]
    pairs = [{"prompt": x, "chosen": y, "rejected": z} for (x, y), (_, z) in pairwise(halves)]
    return [x for x in pairs if all(_begins(words, x["prompt"], x[key]) for key in ("chosen", "rejected"))]


def _begins(words: Any, prompt: str, completion: str) -> bool:
    before = words(prompt)["input_ids"]
    return words(prompt + completion)["input_ids"][: len(before)] == before


def reward(completions: list[str], **_: Any) -> list[float]:
    """How many characters are letters."""
    return [sum(c.isalpha() for c in x) / 64 for x in completions]


def options(kind: str, folder: str, steps: int) -> dict[str, Any]:
    """Those that ours and TRL's share."""
    shared = {"output_dir": folder, "max_steps": steps, "logging_steps": 1, "per_device_train_batch_size": ROWS[kind],
              "learning_rate": 1e-4, "lr_scheduler_type": "constant", "report_to": "none", "disable_tqdm": True,
              "seed": 0, "save_strategy": "no", "max_grad_norm": 1.0}  # fmt: skip
    own = {"SFT": {"max_length": 256}, "DPO": {"max_length": 256, "beta": 0.1, "precompute_ref_log_probs": True},
           "GRPO": {"num_generations": 8, "max_completion_length": 64, "beta": 0.0, "temperature": 1.0}}  # fmt: skip
    return shared | own[kind]


class Paced(TrainerCallback):
    """Lets a trainer do a step for each turn. ask: waits for a turn. tell: gives [seconds, CPU seconds, loss]."""

    def __init__(self, ask: Any, tell: Any):
        self.ask, self.tell = ask, tell
        self.begin = self.cpu = 0.0
        self.loss: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._wait()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.tell([time.perf_counter() - self.begin, time.process_time() - self.cpu, float(logs["loss"])])
            if state.global_step < state.max_steps:
                self._wait()

    def _wait(self) -> None:
        self.ask()
        self.begin, self.cpu = time.perf_counter(), time.process_time()


def work(turns: harness.Turns, kind: str, steps: int, folder: str) -> None:
    from tutti import align

    words = tokenizer()
    data = rows(kind, words)
    turns_left = iter(range(steps))
    callbacks = [Paced(turns.wait, lambda measured: turns.done(measured, step=next(turns_left)))]
    arguments = {**options(kind, folder, steps), "plan": "single", "level": "O2"}
    shared: dict[str, Any] = {"train_dataset": data, "processing_class": words, "callbacks": callbacks}
    if kind == "SFT":
        trainer: Any = align.SFTTrainer(model(), align.SFTConfig(**arguments), **shared)
    elif kind == "DPO":
        trainer = align.DPOTrainer(model(), args=align.DPOConfig(**arguments), **shared)
    else:
        trainer = align.GRPOTrainer(model(), reward, align.GRPOConfig(**arguments), **shared)
    trainer.train()
    turns.wait()


class Peer(harness.Beside):
    def __init__(self, kind: str, steps: int, folder: str) -> None:
        super().__init__("trl", (TRL,), {}, "align_trl.py", kind, str(steps), folder)

    def turn(self, steps: int) -> list[float]:
        *measured, self.peak = self.ask(steps)
        return measured


def compared(kind: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = harness.Process("tutti", work, kind, steps, f"{folder}/a"), Peer(kind, steps, f"{folder}/b")
        both = [[x.turn(1) for x in (ours, theirs)] for _ in range(steps)]
        peaks = [ours.facts["peak_rss_bytes"], theirs.peak]
        for x in (ours, theirs):
            x.close()
    steady = both[min(FIRST, steps // 2) :]

    def ratio(at: int) -> float:
        return statistics.median(b[at] / a[at] for a, b in steady)

    figures: dict[str, Any] = {"speed": ratio(1), "wall": ratio(0),
                            "seconds": [statistics.median(x[i][0] for x in steady) for i in (0, 1)],
                            "peak memory": peaks[0] / peaks[1],
                            "megabytes": [round(x / 1e6) for x in peaks]}  # fmt: skip
    if kind != "GRPO":
        figures["largest difference"] = max(abs(a[2] - b[2]) for a, b in both[:COMPARED])
        figures["last loss"] = [x[2] for x in both[-1]]
    harness.say(f"{kind}: {figures}")
    return figures


def run(quick: bool) -> dict[str, Any]:
    return {kind: compared(kind, steps) for kind, steps in (QUICK if quick else STEPS).items()}


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])
