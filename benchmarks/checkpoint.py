"""What a checkpoint costs while a Llama trains on one CPU: exposed time of a save, and how fast it is written.

In turns: steps without a save, and as many that one spans, which is begun before the first and is complete before the
last (with as many steps as that takes). What the second takes longer is exposed; of it the copy of the state alone is
what training waits for, the rest is what is shared. Training has one core, as a GPU's host would have cores to spare.
`write` is the bytes of the state over the seconds from the copy to the complete checkpoint, checksums included; the
disk's own speed is that of one file of as many bytes, written and brought to the disk. `load` is that of reading it
into the step again. `--quick` has a model of a fifth of the size.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

import harness
import models
import tutti

ROUNDS = 7


def make(quick: bool) -> tuple[tutti.Step, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    hidden, layers = (256, 4) if quick else (640, 8)
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8, intermediate_size=hidden * 11 // 4,
        vocab_size=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = models.integers(8, 256, below=8192)
    batch = {"input_ids": ids, "labels": ids.clone()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tutti.parallelize(model, optimizer, batch, cluster="cpu:1", plan="single", level="O0"), batch


def disk_seconds(folder: Path, count: int) -> float:
    """One file of so many bytes, brought to the disk."""
    content = os.urandom(1 << 24)
    start = time.perf_counter()
    with open(folder / "plain", "wb") as file:
        for _ in range(count // len(content) + 1):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "plain").unlink()
    return seconds


def run(quick: bool) -> dict[str, Any]:
    step, batch = make(quick)
    state = sum(x.nbytes for x in step.training_state().values())
    harness.say(f"a state of {state / 2**20:.0f} MiB")
    exposed, copying, writing, disk, spans, loading = [], [], [], [], [], []
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:  # on a disk, which /tmp may not be
        checkpoints = tutti.Checkpoints(folder, keep=1)
        for i in range(ROUNDS + 1):
            start = time.perf_counter()
            step.save(checkpoints)
            copied, count, newest = time.perf_counter(), 0, None
            while newest is None:
                step(batch)
                count += 1
                newest = checkpoints.done()
            complete = time.perf_counter()
            for _ in range(count):
                step(batch)
            plain = time.perf_counter() - complete
            if i == 0:  # memory for the copy is new, and everything is warm after it
                continue
            exposed.append((complete - start - plain) / plain)
            copying.append((copied - start) / plain)
            spans.append(count)
            step.save(checkpoints)
            begun = time.perf_counter()
            newest = checkpoints.wait()
            writing.append(time.perf_counter() - begun)
            disk.append(disk_seconds(Path(folder), state))
            begun = time.perf_counter()
            step.load(newest)
            loading.append(time.perf_counter() - begun)
            harness.say(f"round {i} of {ROUNDS}: {count} steps, {exposed[-1]:.1%} exposed, {copying[-1]:.1%} waited, "
                        f"written in {writing[-1] / disk[-1]:.2f} of the disk's time")  # fmt: skip
    median = statistics.median
    return {
        "state_bytes": state,
        "steps_spanned": median(spans),
        "exposed": round(median(exposed), 4),
        "waited_for": round(median(copying), 4),
        "write_over_disk_seconds": round(median(a / b for a, b in zip(writing, disk, strict=True)), 3),
        "write_bytes_per_second": round(state / median(writing)),
        "disk_bytes_per_second": round(state / median(disk)),
        "load_bytes_per_second": round(state / median(loading)),
    }


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
