"""Compile time against depth: from `parallelize` to the end of the first step, of Llamas that differ in depth alone.

Each measurement is a process of its own with an empty cache on disk, then another with the cache that the first has
left. The peer is a bare loop whose model is compiled whole by `torch.compile`; it is measured up to 30 layers, because
its time grows with depth.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

import harness
import tutti
from tutti.compile.segment_calls import COMPILED
from tutti.exec.kernels import levels

DEPTHS, QUICK_DEPTHS = (6, 12, 30, 60, 120), (2, 4, 8)
DEEPEST_PEER = 30
VOCAB, SEQUENCE, BATCH = 2048, 64, 4


def prepared(depth: int) -> tuple[LlamaForCausalLM, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, num_hidden_layers=depth, num_attention_heads=4, intermediate_size=352,
                         vocab_size=VOCAB, max_position_embeddings=SEQUENCE)  # fmt: skip
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), {"input_ids": tokens, "labels": tokens}


def start_tutti(turns: harness.Turns, depth: int, level: str, cache: str) -> None:
    """One step of a new process; of its seconds those in which functions were compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    turns.wait()
    compiling = []
    compile_ahead = levels.compile_ahead

    def timed(graph, inputs):
        start = time.perf_counter()
        compile_ahead(graph, inputs)
        compiling.append(time.perf_counter() - start)

    levels.compile_ahead = timed
    model, optimizer, batch = prepared(depth)
    start = time.perf_counter()
    step = tutti.parallelize(model, optimizer, batch, level=level, clip_norm=1.0)
    planned = time.perf_counter() - start
    loss = step(batch).item()
    seconds = time.perf_counter() - start
    turns.done([seconds], planned=planned, compiling=sum(compiling), functions=len(COMPILED), loss=loss)


def start_torch(turns: harness.Turns, depth: int, cache: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    turns.wait()
    model, optimizer, batch = prepared(depth)
    start = time.perf_counter()
    compiled = torch.compile(model)
    loss = compiled(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    turns.done([time.perf_counter() - start], loss=loss.item())


def measure(name: str, work: Any, *args: Any) -> dict[str, Any]:
    """The figures of a first start and of a second one."""
    figures = {}
    with tempfile.TemporaryDirectory() as cache:
        for start in ("first", "second"):
            process = harness.Process(f"{name}, {start} start", work, *args, cache)
            (seconds,) = process.turn(1)
            figures[start] = {"seconds": seconds, **process.facts}
            harness.say(f"{process.name}: {seconds:.1f} s")
            process.close()
    return figures


def run(quick: bool) -> dict[str, Any]:
    depths = QUICK_DEPTHS if quick else DEPTHS
    figures: dict[str, dict[int, Any]] = {"tutti O1": {}, "tutti O2": {}, "torch.compile": {}}
    for depth in depths:
        for level in ("O1", "O2"):
            name = f"tutti {level}"
            figures[name][depth] = measure(f"{name}, {depth} layers", start_tutti, depth, level)
        if depth <= DEEPEST_PEER:
            figures["torch.compile"][depth] = measure(f"torch.compile, {depth} layers", start_torch, depth)
    for depth in figures["torch.compile"]:
        losses = {of[depth][start]["loss"] for of in figures.values() for start in ("first", "second")}
        if max(losses) - min(losses) > 1e-3:
            raise RuntimeError(f"the contenders do not train the same model: first losses {losses}")
    ratios = {}
    for name in ("tutti O1", "tutti O2"):
        seconds = [figures[name][depth]["first"]["compiling"] for depth in depths]
        ratios[name] = {"longest_over_shortest": max(seconds) / min(seconds)}
        harness.say(f"{name}: compiling takes {min(seconds):.1f} to {max(seconds):.1f} s")
    if not quick:
        draw(figures)
    return {"case": {"hidden": 128, "vocab": VOCAB, "batch": BATCH, "sequence": SEQUENCE},
            "contenders": figures, "compile_time": ratios}  # fmt: skip


def draw(figures: dict[str, dict[int, Any]]) -> None:
    axes = (figure := Figure((7, 4))).subplots()
    for name, by_depth in figures.items():
        (line,) = axes.plot(list(by_depth), [f["first"]["seconds"] for f in by_depth.values()], "o-", label=name)
        again = [f["second"]["seconds"] for f in by_depth.values()]
        axes.plot(list(by_depth), again, "o:", color=line.get_color(), label=f"{name}, again")
    axes.set(xlabel="layers", ylabel="seconds to the end of the first step", ylim=(0, None))
    axes.legend()
    figure.savefig(harness.RESULTS / "compile_time.svg")


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
