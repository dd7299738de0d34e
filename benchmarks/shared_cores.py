"""Decoding beside a process that uses a core: the engine's own threads against those of OpenMP, in turns.

A Llama of 104M with random weights, bfloat16, greedy, 1 and 16 sequences, as many threads as there are cores. Each
contender is a process of its own; one waits while the other works. The busy process computes in Python without pause.
`times`: seconds of a step with OpenMP over those with own threads, median over turns, alone and beside it.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import harness
from serve import load_of, model_of

ROUNDS, SIZE = 9, "104M"


def work(turns: harness.Turns, whose: str) -> None:
    from tutti.serve import Engine, Request, Sampling

    engine = Engine(model_of(SIZE), plan="single", memory=512 << 20, prefix_cache=False)
    if whose == "openmp":
        engine.runner.own_threads = 0
    engine.warm_up()

    def seconds(count: int) -> float:
        """Seconds of a step, after the prompts."""
        load = load_of(f"batch {count}", SIZE)
        outputs = [engine.add(Request(x, Sampling(max_tokens=n, temperature=0, ignore_end=True))) for x, n in load]
        while not all(x.tokens for x in outputs):
            engine.step()
        begin, steps = time.perf_counter(), 0
        while engine.busy:
            engine.step()
            steps += 1
        return (time.perf_counter() - begin) / steps

    while count := turns.wait():
        turns.done([seconds(count)])


def compute() -> None:
    """Use a core."""
    while True:
        sum(range(100_000))


def compared(contenders: list[harness.Process], count: int, rounds: int) -> dict[str, float]:
    times = harness.take_turns(contenders, rounds, steps=count, warmup=count)  # a turn decodes `count` sequences
    return {
        "own threads, s": harness.summary(times["own"])["median"],
        "openmp, s": harness.summary(times["openmp"])["median"],
        "times": harness.ratio(times, ["own"], ["openmp"])["times_faster"],
    }


def run(quick: bool) -> dict[str, Any]:
    contenders = [harness.Process(name, work, name) for name in ("own", "openmp")]
    busy = multiprocessing.get_context("spawn").Process(target=compute, daemon=True)
    figures: dict[str, Any] = {}
    for case in ("alone", "beside a busy process"):
        if case != "alone":
            busy.start()
        for count in (1, 16):
            figures[f"{case}, batch {count}"] = compared(contenders, count, 3 if quick else ROUNDS)
            harness.say(f"{case}, batch {count}: {figures[f'{case}, batch {count}']}")
    busy.kill()
    for contender in contenders:
        contender.close()
    return figures


if __name__ == "__main__":
    harness.main(run, __file__)
