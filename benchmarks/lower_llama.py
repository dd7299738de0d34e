"""From a Llama of 7B parameters to the program of one of eight ranks, on one CPU: seconds to capture, plan and lower.

The model has 32 layers and is on the meta device, without weights: bf16 with float32 masters, AdamW, batches of
8 x 4096 tokens. The plan is asked for by its name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import harness
import tutti
from tutti.analysis.passes import improve
from tutti.lower.shard import shard
from tutti.plan.planner import Planner

LAYERS, QUICK_LAYERS = 32, 4
BATCH, SEQUENCE = 8, 4096
CLUSTER, PLANS = "h100:8", ("tp2xzero3", "dp8", "tp8", "zero3")


def llama(layers: int) -> LlamaForCausalLM:
    """Shapes of Llama-2 7B (Touvron et al. 2023)."""
    config = LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        intermediate_size=11008,
        vocab_size=32000,
        max_position_embeddings=SEQUENCE,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def run(quick: bool) -> dict[str, Any]:
    model = llama(QUICK_LAYERS if quick else LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.empty(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    capture, by_plan = {}, {}
    with timed(capture, "capture"):
        graph = tutti.capture(
            model, {"input_ids": ids, "labels": ids}, optimizer, clip_norm=1.0, fp32_master_weights=True
        )
    step = graph.keep([name for name in graph.outputs if name not in graph.gradient_names])
    for name in PLANS:
        seconds: dict[str, float] = {}
        with timed(seconds, f"plan {name}"):
            plan = Planner(graph, tutti.Cluster.parse(CLUSTER)).named(name)
        with timed(seconds, f"lower {name}"):
            program = shard(step, plan, rank=0)
            improve(program, "O0")  # buckets of collectives, updates in place
        by_plan[name] = {
            "plan_seconds": seconds[f"plan {name}"],
            "lower_seconds": seconds[f"lower {name}"],
            "program_nodes": len(program.graph.nodes),
            "collectives": len(program.collectives),
            "bytes_sent": program.sent,
        }
    slowest = max(by_plan, key=lambda name: by_plan[name]["lower_seconds"])
    return {
        "layers": model.config.num_hidden_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": [BATCH, SEQUENCE],
        "cluster": CLUSTER,
        "nodes": len(graph.nodes),
        "capture_seconds": capture["capture"],
        "plans": by_plan,
        "slowest_lower_seconds": by_plan[slowest]["lower_seconds"],
    }


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
    harness.say(f"{name}: {seconds[name]:.2f} s")


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
