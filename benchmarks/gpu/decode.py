"""Where a decoding step spends its time on one GPU: the engine with a Llama of the shapes of the 1B, bfloat16, greedy.

For 1, 16 and 64 sequences with prompts of 64 tokens: seconds of a step, seconds of it in which the device works, and
the kernels that take longest. `start` is the time of `Engine(...)`, self-check included.

    python benchmarks/gpu/decode.py [--quick]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import harness
import serve

STEPS, KERNELS = 20, 16


def measure(engine: Any, count: int, size: str) -> dict[str, Any]:
    from tutti.serve import Request, Sampling

    sampling = Sampling(max_tokens=2 * STEPS + 8, temperature=0, ignore_end=True)
    outputs = [engine.add(Request(x, sampling)) for x in serve.prompts_of(count, size)]
    while not all(x.tokens for x in outputs):
        engine.step()
    engine.step()
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    with profile(activities=[ProfilerActivity.CUDA if serve.GPU else ProfilerActivity.CPU]) as watched:
        for _ in range(STEPS):
            engine.step()
    while engine.busy:
        engine.step()
    own = [(x.self_device_time_total if serve.GPU else x.self_cpu_time_total, x) for x in watched.key_averages()]
    own = sorted(((us, x) for us, x in own if us), key=lambda row: -row[0])
    return {
        "seconds_per_step": statistics.median(seconds),
        "device_seconds_per_step": sum(us for us, _ in own) / STEPS / 1e6,
        "kernels": [{"name": x.key[:80], "calls": x.count / STEPS, "microseconds": us / STEPS}
                    for us, x in own[:KERNELS]],
    }  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    from tutti.serve import Engine

    size = "1B" if serve.GPU else "small"
    model, begin = serve.model_of(size), serve.wait()
    memory = 2 << 30 if serve.GPU else 1 << 26
    engine = Engine(model, plan="single", memory=memory, most=max(serve.BATCHES), prefix_cache=False)
    start = serve.wait() - begin
    batches = {count: measure(engine, count, size) for count in (serve.BATCHES[:1] if quick else serve.BATCHES)}
    return {"model": size, "start": start, "weight_bytes": serve.weights(model), "batches": batches}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
