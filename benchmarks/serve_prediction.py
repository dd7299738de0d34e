"""Predicted and measured service of six loads, by the engine on this machine.

The costs of its steps are measured first (`tutti.serve.apart.costs.measured`). Then the engine's scheduler runs each
load with a clock in place of devices (`tutti.serve.apart.simulate`), and the engine serves it: Llama 104M, bfloat16,
two threads.

- `ttft`, `tpot`: median seconds to the first token and of each further one. `throughput`: tokens per second.
- `error`: of the prediction, relative to what was measured. `median error`: over all loads and the three numbers.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

import harness
from serve import model_of
from tutti.serve import Engine, Request, Sampling
from tutti.serve.apart.costs import measured
from tutti.serve.apart.simulate import SimulatedEngine, Sizes, simulate
from tutti.serve.bench import Arrival, Measured, poisson, report

NUMBERS = ("ttft", "tpot", "throughput")


def loads(rate: float) -> dict[str, list[Arrival]]:
    """Loads by name. rate: requests of 128 + 64 tokens in a second that the engine can serve."""
    return {
        "a third of capacity": poisson(24, rate / 3, (64, 192), (32, 96), 0),
        "capacity": poisson(48, rate, (64, 192), (32, 96), 1),
        "one and a half times capacity": poisson(48, 1.5 * rate, (64, 192), (32, 96), 2),
        "all at once": poisson(32, 0, (16, 256), (16, 128), 3),
        "long prompts": poisson(24, rate / 2, (384, 768), (8, 24), 4),
        "long outputs": poisson(16, rate / 3, (16, 32), (128, 256), 5),
    }


def serve(engine: Engine, arrivals: list[Arrival]) -> list[Measured]:
    """What clients of the engine see."""
    draw, clients = random.Random(0), [Measured(x) for x in arrivals]
    prompts = [[draw.randrange(3, 32000) for _ in range(int(x.prompt))] for x in arrivals]
    outputs: list[Any] = []
    begin = time.monotonic()
    while len(outputs) < len(arrivals) or engine.busy:
        while len(outputs) < len(arrivals) and arrivals[len(outputs)].at <= time.monotonic() - begin:
            i = len(outputs)
            sampling = Sampling(max_tokens=arrivals[i].tokens, temperature=0, ignore_end=True)
            outputs.append(engine.add(Request(prompts[i], sampling)))
        if engine.busy:
            engine.step()
        else:
            time.sleep(max(0.0, arrivals[len(outputs)].at - (time.monotonic() - begin)))
    for x, output in zip(clients, outputs, strict=True):
        x.status, x.tokens, x.times = 200, len(output.tokens), [t - begin for t in output.times]
        x.end = x.times[-1]
    return clients


def numbers(clients: list[Measured]) -> dict[str, float]:
    summary = report(clients, 1, 1)
    return {"ttft": summary.ttft["p50"], "tpot": summary.tpot["p50"], "throughput": summary.throughput}


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(2)
    engine = Engine(model_of("104M"), plan="single", memory=512 << 20)
    engine.warm_up()
    costs = measured(engine)
    sizes = Sizes(engine.pool.count, engine.pool.size, engine.scheduler.budget, engine.scheduler.most)

    def predict(arrivals: list[Arrival]) -> dict[str, float]:
        return numbers(simulate(arrivals, [SimulatedEngine(sizes, costs)]))

    full = [Arrival(0.0, 128, 64)] * 64
    rate = predict(full)["throughput"] / 64
    harness.say(f"costs {costs}; capacity {rate:.1f} requests/s")
    figures: dict[str, Any] = {}
    for name, arrivals in list(loads(rate).items())[: 2 if quick else None]:
        predicted, seen = predict(arrivals), numbers(serve(engine, arrivals))
        error = {x: abs(predicted[x] / seen[x] - 1) for x in NUMBERS}
        figures[name] = {"predicted": predicted, "measured": seen, "error": error}
        harness.say(f"{name}: {figures[name]}")
    errors = [x["error"][n] for x in figures.values() for n in NUMBERS]
    return {"loads": figures, "median error": statistics.median(errors), "largest error": max(errors)}


if __name__ == "__main__":
    harness.main(run, __file__, ["transformers"])
