"""Where a training step spends its time on one GPU: a Llama of the shapes of the 1B, as in `benchmarks/gpu/train.py`.

Tutti at O2 and a loop with `torch.compile`, one after the other, each in a process of its own: seconds of a step,
seconds of it in which the device works, and the kernels that take longest.

    python benchmarks/gpu/train_profile.py [--quick]
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import harness
import train
import trainers

WARM, STEPS, KERNELS = 5, 5, 32
ANNOTATIONS = "ProfilerStep", "Optimizer.", "## Call", "Torch-Compiled"


def with_tutti(workload: train.Workload) -> Callable[[], torch.Tensor]:
    import tutti

    model, batches = workload.model().to(train.BF16), workload.batches(train.BF16)
    model.config.use_cache = True  # type: ignore[union-attr]  # see train.py
    first = next(batches)
    step = tutti.parallelize(model, trainers.adamw(model), first, loss=workload.loss, level="O2",
                             clip_norm=trainers.CLIP_NORM, fp32_master_weights=True)  # fmt: skip
    batches = itertools.chain([first], batches)
    return lambda: step(next(batches))


def in_a_loop(workload: train.Workload) -> Callable[[], torch.Tensor]:
    score, model, batches = torch.compile(workload.score), workload.model(), workload.batches()
    optimizer = trainers.adamw(model, fused=True)

    def step() -> torch.Tensor:
        with torch.autocast(train.DEVICE.type, train.BF16):
            loss = score(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainers.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


CONTENDERS = {"tutti O2": with_tutti, "torch.compile": in_a_loop}


def measure(name: str, small: bool) -> dict[str, Any]:
    workload = train.SMALL["Llama"] if small else train.FULL["Llama 1B"]
    finish = torch.cuda.synchronize if train.GPU else lambda: None
    begin = time.perf_counter()
    step = CONTENDERS[name](workload)
    first_loss = step().item()
    compiled = time.perf_counter() - begin
    for _ in range(WARM):
        step()
    finish()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    finish()
    seconds = (time.perf_counter() - begin) / STEPS
    with profile(activities=[ProfilerActivity.CUDA if train.GPU else ProfilerActivity.CPU]) as watched:
        for _ in range(STEPS):
            step()
        finish()
    own = [(x.self_device_time_total if train.GPU else x.self_cpu_time_total, x) for x in watched.key_averages()]
    own = [(us, x) for us, x in own if us and not x.key.startswith(ANNOTATIONS)]
    own.sort(key=lambda row: -row[0])
    return {
        "first_loss": first_loss,
        "seconds_until_the_first_step": compiled,
        "seconds_per_step": seconds,
        "device_seconds_per_step": sum(us for us, _ in own) / STEPS / 1e6,
        "peak_bytes": torch.cuda.max_memory_allocated() if train.GPU else None,
        "kernels": [{"name": x.key[:90], "calls": x.count / STEPS, "microseconds": us / STEPS}
                    for us, x in own[:KERNELS]],
    }  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in CONTENDERS:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            rows[name] = process.apply(measure, (name, quick or not train.GPU))
        harness.say(f"{name}: {rows[name]['seconds_per_step']:.4f} s a step")
    return {"contenders": rows}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
