"""Kernels of the inference engine against PyTorch's, in turns, on two threads.

A linear layer of few rows (`torch.nn.functional.linear` against `tutti::linear_rows`, and with weights of int8 and
int4), attention over a paged cache (against `scaled_dot_product_attention` over keys that lie together, which an engine
with PyTorch's kernel would first have to gather), writes into the cache (against `index_copy_`), and drawing tokens
(against sorting). Weights and caches are so many that none stays in a processor's cache, as in a model. Of each kernel,
how many times faster than PyTorch's it is: the median over rounds, and `smallest`, the quotient of the smallest times,
which tell more while other processes want the machine. `peer_seconds` and `gigabytes_per_second` of weights are by
smallest times. `--quick` is a layer of 768 numbers and a short cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import harness
import tutti.nn.attention.paged_attention
import tutti.nn.attention.paged_write  # noqa: F401  (registers the operators)
from tutti.nn import sample
from tutti.nn.linear.linear_int4 import quantize_int4
from tutti.nn.linear.linear_int8 import quantize_int8

ops = torch.ops.tutti
THREADS = 2
ROWS = 1, 2, 4, 8, 16, 32, 64, 256
LAYERS = (768, 768), (2048, 768), (768, 2048), (32000, 768), (8192, 2048), (2048, 8192)  # outputs, inputs
BYTES = 100_000_000  # of weights, or of a cache, that are used one after another
SECONDS = 0.01  # of a turn
BLOCK = 16
# name: new tokens, cached tokens, heads, key heads
CACHES = {
    "decode, 128 keys": ([1], [128], 12, 12),
    "decode, 2048 keys": ([1], [2048], 12, 12),
    "16 decode, 256 keys": ([1] * 16, [256] * 16, 12, 12),
    "16 decode, 256 keys, groups of 4": ([1] * 16, [256] * 16, 32, 8),
    "prompt of 256": ([256], [256], 12, 12),
    "prompt of 2048": ([2048], [2048], 12, 12),
    "256 of 2048": ([256], [2048], 12, 12),
}


class Contender:
    """A function that is called in turns, each time with the next of its operands."""

    def __init__(self, name: str, function: Callable, operands: list[tuple]) -> None:
        self.name, self.function, self.operands = name, function, cycle(operands)
        self.turn(3)
        self.calls = max(1, int(SECONDS / min(self.turn(3))))

    def turn(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.function(*next(self.operands))
            seconds.append(time.perf_counter() - start)
        return seconds


class Case(NamedTuple):
    """peer: the name of the contender that the others are compared with. bytes: weights that a call of it reads."""

    name: str
    peer: str
    contenders: list[Contender]
    bytes: int = 0


def linear_cases(quick: bool, dtype: torch.dtype) -> Iterator[Case]:
    for n, k in LAYERS[: 1 if quick else None]:
        size = n * k * dtype.itemsize
        weights = [torch.randn(n, k).to(dtype) / k**0.5 for _ in range(-(-BYTES // size))]
        kinds: dict[str, tuple[Callable, list[tuple]]] = {
            "torch": (F.linear, [(w,) for w in weights]),
            "linear_rows": (lambda x, w: ops.linear_rows(x, w, None), [(w,) for w in weights]),
        }
        if dtype == torch.bfloat16:
            q8, q4 = [quantize_int8(w) for w in weights], [quantize_int4(w) for w in weights]
            kinds |= {
                "int8": (ops.linear_int8, q8),
                "int8, rows rounded": (lambda *x: ops.linear_int8(*x, rounded=True), q8),
                "int4": (ops.linear_int4, q4),
                "int4, rows rounded": (lambda *x: ops.linear_int4(*x, rounded=True), q4),
            }
        for m in ROWS:
            x = torch.randn(m, k).to(dtype)
            contenders = [Contender(kind, f, [(x, *w) for w in operands]) for kind, (f, operands) in kinds.items()]
            yield Case(f"linear {n} x {k}, {m} rows", "torch", contenders, size)


def attention_cases(quick: bool, dtype: torch.dtype) -> Iterator[Case]:
    width = 64
    for name, (counts, lengths, heads, groups) in list(CACHES.items())[: 1 if quick else None]:
        new, cached = counts[0], lengths[0]
        caches = max(1, BYTES // (2 * sum(lengths) * groups * width * dtype.itemsize))
        query = torch.randn(sum(counts), heads, width).to(dtype)
        tables = torch.randperm(sum(lengths) // BLOCK).view(len(lengths), -1).int()
        starts, each = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(lengths).int()
        paged = [[torch.randn(sum(lengths), groups, width).to(dtype) for _ in "kv"] for _ in range(caches)]
        dense = [[x.view(len(lengths), cached, groups, width).transpose(1, 2) for x in pair] for pair in paged]
        queries = query.view(len(counts), new, heads, width).transpose(1, 2)

        def ours(keys, values, query=query, where=(tables, starts, each)):
            return ops.paged_attention(query, keys, values, *where, block=BLOCK, scale=width**-0.5)

        def theirs(keys, values, query=queries, causal=new == cached, grouped=heads > groups):
            return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=grouped)

        contenders = [Contender("torch", theirs, dense), Contender("paged_attention", ours, paged)]
        yield Case(name, "torch", contenders)


def other_cases() -> Iterator[Case]:
    cache, values = torch.zeros(4096, 12, 64).bfloat16(), torch.randn(16, 12, 64).bfloat16()
    slots = torch.randperm(4096)[:16]
    yield Case("write of 16 rows", "torch", [
        Contender("torch", lambda: cache.index_copy_(0, slots, values), [()]),
        Contender("paged_write_", lambda: ops.paged_write_(cache, values, slots), [()]),
    ])  # fmt: skip
    for rows in (1, 16):
        logits = 3 * torch.randn(rows, 32000)
        options = [torch.full((rows,), x) for x in (0.8, 50, 0.9, 0.0)]
        operands = (logits, *options, torch.rand(rows))
        yield Case(f"sample of {rows} rows", "torch", [
            Contender("torch", sample.reference, [operands]), Contender("sample", ops.sample, [operands])
        ])  # fmt: skip


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """A row of the result. Of each contender: how many times faster than the peer, by rounds and by smallest times."""
    times: dict[str, list[float]] = {contender.name: [] for contender in case.contenders}
    for i in range(rounds):
        first = i % len(case.contenders)
        for contender in [*case.contenders[first:], *case.contenders[:first]]:
            times[contender.name].append(statistics.median(contender.turn(contender.calls)))
    peer = times.pop(case.peer)
    row: dict[str, Any] = {"case": case.name, "peer_seconds": min(peer)}
    for name, own in times.items():
        row[name] = statistics.median(a / b for a, b in zip(peer, own, strict=True))
        row[f"{name}, smallest"] = min(peer) / min(own)
    if case.bytes:
        row["gigabytes_per_second"] = case.bytes / min(times["linear_rows"]) / 1e9
    harness.say(", ".join(f"{k}: {v:.2f}" if isinstance(v, float) and v > 0.01 else f"{v}" for k, v in row.items()))
    return row


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rounds = 3 if quick else 5
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    kinds = {"linear_bfloat16": (linear_cases, torch.bfloat16), "linear_float32": (linear_cases, torch.float32),
             "attention_bfloat16": (attention_cases, torch.bfloat16),
             "attention_float32": (attention_cases, torch.float32)}  # fmt: skip
    for name, (make, dtype) in kinds.items():
        result[name] = [measured(case, rounds) for case in make(quick, dtype)]
    return result | {"others": [measured(case, rounds) for case in other_cases()]}


if __name__ == "__main__":
    harness.main(run, __file__)
