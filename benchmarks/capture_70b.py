"""Capture of a 70B Llama as one graph, and its best plan for 64 H100s, on one CPU: seconds by part and peak memory.

The model is on the meta device and has no weights: bf16 with float32 masters, AdamW, batches of 16 x 4096 tokens.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import harness
import tutti
from tutti.lower.variants.vary import vary
from tutti.plan.search.search import Search
from tutti.sim.planning import Simulator


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    sequence: int
    batch: int
    cluster: str

    def model(self) -> LlamaForCausalLM:
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=self.sequence,
            dtype=torch.bfloat16,
        )
        with torch.device("meta"):
            return LlamaForCausalLM(config).to(torch.bfloat16).train()


FULL = Case(8192, 80, 64, 8, 28672, 128256, sequence=4096, batch=16, cluster="h100:8x8")
QUICK = Case(8192, 8, 64, 8, 28672, 128256, sequence=4096, batch=16, cluster="h100:8")


def run(quick: bool) -> dict[str, Any]:
    case = QUICK if quick else FULL
    seconds: dict[str, float] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start
        harness.say(f"{name}: {seconds[name]:.1f} s, peak {peak_rss() / 2**30:.2f} GiB")

    before = peak_rss()
    with part("model"):
        model = case.model()
        ids = torch.empty(case.batch, case.sequence, dtype=torch.long, device="meta")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with part("capture"):
        graph = tutti.capture(
            model, {"input_ids": ids, "labels": ids}, optimizer, clip_norm=1.0, fp32_master_weights=True
        )
    with part("plan"):
        search = Search(
            lambda count, variant: vary(graph, variant), case.batch, tutti.Cluster.parse(case.cluster), Simulator("O2")
        )
        plan = search.best()
    prediction = plan.predicted
    return {
        "case": vars(case),
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": len(graph.nodes),
        "flops_per_step": graph.flops,
        "seconds": {**seconds, "total": sum(seconds.values())},
        "peak_rss_bytes": peak_rss(),
        "rss_before_bytes": before,
        "plan": {
            "name": plan.name,
            "predicted_step_seconds": prediction.step_seconds,
            "predicted_peak_bytes_per_device": prediction.peak_bytes,
            "reasons": plan.reasons,
        },
    }


def peak_rss() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
