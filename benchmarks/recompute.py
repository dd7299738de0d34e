"""Recomputation on one CPU: the peak of a training step against its time, ours and PyTorch's, compiled, in turns.

Ours: the cheapest operators whose results need not be kept (`plan.search.recompute`), for shares of the activations.
PyTorch's: `torch.compile` with the same shares as `activation_memory_budget` of its min-cut partitioner. A Llama, a T5
and a UNet2D of diffusers, all with a fused AdamW; one process for each contender. A peak is what is allocated at once
beyond what lies there between steps; `at_equal_time` holds the smallest of our peaks that takes no longer,
interpolated, against each of PyTorch's. `--quick` is the Llama at two shares, and takes three minutes to compile.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

import harness
import models
import tutti
from tutti.hardware import Cluster
from tutti.lower.variants.vary import vary
from tutti.plan.planner import Planner
from tutti.plan.search.recompute import Activations
from tutti.plan.variant import Variant
from tutti.sim.forward import forward_seconds
from tutti.train.text.memory import PeakMemory, live_bytes

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
ROUNDS, STEPS = 5, 2
VOCABULARY = 4096


def _tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = models.integers(batch, length, below=VOCABULARY)
    return {"input_ids": ids, "labels": ids.clone()}


def llama() -> models.Case:
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=704,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens(8, 256), None


def t5() -> models.Case:
    config = transformers.T5Config(
        d_model=256, d_ff=1024, d_kv=64, num_layers=3, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _tokens(8, 128), None


def unet2d() -> models.Case:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(32, 64),
        norm_num_groups=8, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    batch = {
        "sample": models.random(8, 3, 32, 32, seed=2), "timestep": models.integers(8, below=1000),
        "noise": models.random(8, 3, 32, 32, seed=3),
    }  # fmt: skip
    return model, batch, models.mean_squared("sample", "noise")


MODELS = {make.__name__: make for make in (llama, t5, unet2d)}


def contend(turns: harness.Turns, name: str, ours: bool, share: float) -> None:
    torch.manual_seed(0)
    model, batch, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, fused=True)
    step = (_ours if ours else _theirs)(model, batch, loss, optimizer, share)
    first, extra = float(step()), extra_bytes(step)
    while steps := turns.wait():
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        turns.done(seconds, first_loss=first, extra_bytes=extra)


def extra_bytes(step: Callable[[], torch.Tensor]) -> int:
    """Bytes at the peak of a step beyond those that lie there before it."""
    peaks: list[int] = []
    peak, before = PeakMemory(peaks.append), 0
    while not peaks:
        gc.collect()
        before = live_bytes()
        peak(step)
    return peaks[0] - before


def _ours(model, batch, loss, optimizer, share):
    cluster = Cluster.parse("cpu:1")
    graph = tutti.capture(model, batch, optimizer, loss)
    activations = Activations(graph)
    again = activations.recompute(share * activations.whole, forward_seconds(graph, cluster, "O2"))
    variant = Variant(recompute=again)
    plan = Planner(vary(graph, variant), cluster, variant=variant).named("single")
    step = tutti.parallelize(model, optimizer, batch, loss=loss, cluster=cluster, plan=plan, level="O2")
    return lambda: step(batch)


def _theirs(model, batch, loss, optimizer, share):
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = share
    loss = loss or (lambda model, batch: model(**batch).loss)
    compute = torch.compile(lambda: loss(model, batch))

    def step() -> torch.Tensor:
        value = compute()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def measure(name: str, shares: tuple[float, ...]) -> dict[str, Any]:
    contenders = [
        harness.Process(f"{'tutti' if ours else 'torch'} {share}", contend, name, ours, share)
        for share in shares for ours in (True, False)
    ]  # fmt: skip
    times = harness.take_turns(contenders, ROUNDS, STEPS)
    losses = {c.facts["first_loss"] for c in contenders}
    assert max(losses) - min(losses) < 1e-4 * max(losses), losses
    base = statistics.median(s for turn in times["torch 1.0"] for s in turn)
    curves: dict[str, Any] = {"tutti": {}, "torch": {}}
    for c in contenders:
        who, share = c.name.split()
        seconds = statistics.median(s for turn in times[c.name] for s in turn)
        curves[who][share] = {"extra_bytes": int(c.facts["extra_bytes"]), "time": round(seconds / base, 4)}
        c.close()
    return {**curves, "at_equal_time": at_equal_time(curves["tutti"].values(), curves["torch"].values())}


def at_equal_time(ours, theirs) -> list[float | None]:
    """The smallest of our peaks that take no longer than each of PyTorch's, as a share of that; none where all do."""
    curve = sorted((p["time"], p["extra_bytes"]) for p in ours)
    shares = []
    for p in theirs:
        before, after = [[x for x in curve if (x[0] > p["time"]) == later] for later in (False, True)]
        if not before:
            shares.append(None)
            continue
        last, least = max(before)[0], min(size for _, size in before)
        if after and after[0][1] < least:
            least += (after[0][1] - least) * (p["time"] - last) / (after[0][0] - last)
        shares.append(round(least / p["extra_bytes"], 4))
    return shares


def run(quick: bool) -> dict[str, Any]:
    result = {}
    for name in ["llama"] if quick else MODELS:
        harness.say(name)
        result[name] = measure(name, SHARES[::3] if quick else SHARES)
        for who in ("tutti", "torch"):
            for share, p in result[name][who].items():
                harness.say(f"{name} {who} {share}: {p['extra_bytes'] / 2**20:.1f} MiB, {p['time']:.3f} of the time")
        harness.say(f"peaks at equal time: {result[name]['at_equal_time']}")
    return result


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers", "diffusers"))
