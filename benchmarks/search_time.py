"""Seconds from a captured graph to a proven plan, on two CPU cores: by mesh, by depth and by the number of devices.

- `meshes`: a Llama with the shapes of Llama-3 8B (hidden 4096, 32 query and 8 key heads, vocabulary 128256), 32 layers,
  sequences of 8192 tokens, bf16 with float32 masters and AdamW, on meshes of one, two and three axes. The cost of the
  choices comes with a lower bound of every other's (`gap`).
- `depth`: the same on a mesh of two axes, with 2 to 64 layers.
- `devices`: the whole search, over every mesh of two axes, for 8 to 4096 devices.
- `large`: a GPT of 200 billion parameters (64 layers, hidden 16384) and a mixture of experts of 1 trillion, on 4096
  devices, from the model to the plan, with the peak memory of the process.

A picture of depth and devices is drawn beside the result.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import harness
import tutti
from tutti.ir.step_graph import StepGraph
from tutti.lower.variants.vary import vary
from tutti.plan.layouts.price import Pricer
from tutti.plan.layouts.problem import problem_of
from tutti.plan.network.sharding_problem import ShardingProblem
from tutti.plan.search.search import Search
from tutti.sim.planning import Simulator

SEQUENCE = 8192
MESHES = {"h100:8": {"dp": 8}, "h100:4": {"dp": 2, "tp": 2}, "h100:32x8": {"dp": 32, "tp": 8},
          "h100:8x8": {"dp": 8, "cp": 4, "tp": 2}}  # fmt: skip
DEPTHS, DEVICES = (2, 4, 8, 16, 32, 64), (8, 64, 512, 4096)


def llama(layers: int, batch: int) -> StepGraph:
    config = transformers.LlamaConfig(
        hidden_size=4096, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=SEQUENCE, dtype=torch.bfloat16,
    )  # fmt: skip
    return capture(transformers.LlamaForCausalLM, config, batch, SEQUENCE)


def gpt_200b(batch: int) -> StepGraph:
    """The shapes of a GPT of 200 billion parameters: 64 layers of hidden size 16384."""
    config = transformers.GPT2Config(
        n_embd=16384, n_layer=64, n_head=128, vocab_size=50304, n_positions=1024, dtype=torch.bfloat16,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return capture(transformers.GPT2LMHeadModel, config, batch, 1024)


def moe_1t(batch: int) -> StepGraph:
    """About 1 trillion parameters: 48 layers of 128 experts, of which 8 see a token."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=6144, num_hidden_layers=48, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        moe_intermediate_size=9216, num_experts=128, num_experts_per_tok=8, vocab_size=151936, dtype=torch.bfloat16,
        decoder_sparse_step=1, output_router_logits=False,
    )  # fmt: skip
    return capture(transformers.Qwen3MoeForCausalLM, config, batch, 1024)


def capture(kind: type, config: Any, batch: int, length: int) -> StepGraph:
    with torch.device("meta"):
        model = kind(config).to(torch.bfloat16).train()
        ids = torch.empty(batch, length, dtype=torch.long)
    if hasattr(config, "num_experts"):
        model.set_experts_implementation("batched_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return tutti.capture(model, {"input_ids": ids, "labels": ids}, optimizer, fp32_master_weights=True)


def by_mesh(graph: StepGraph) -> dict[str, Any]:
    figures = {}
    for name, mesh in MESHES.items():
        start = time.perf_counter()
        joint = ShardingProblem(problem_of(graph), Pricer(tutti.Cluster.parse(name), mesh))
        built = time.perf_counter()
        chosen = joint.choose(seconds=120)
        end = time.perf_counter()
        shown = "x".join(map(str, mesh.values()))
        figures[shown] = {
            "seconds": end - start, "build_seconds": built - start, "solve_seconds": end - built,
            "cost": chosen.cost, "gap": chosen.gap, "states": sum(map(len, joint.network.unary.values())),
        }  # fmt: skip
        harness.say(f"mesh {shown}: {end - start:.1f} s, gap {chosen.gap:.1e}")
    return figures


def timed_search(graph: StepGraph, cluster: str) -> dict[str, Any]:
    start, on = time.perf_counter(), tutti.Cluster.parse(cluster)
    plan = Search(lambda count, variant: vary(graph, variant), 1, on, Simulator("O2"), accumulate=1).ranked()[0]
    seconds, prediction = time.perf_counter() - start, plan.predicted
    return {
        "seconds": seconds, "plan": plan.name, "mesh": dict(plan.mesh), "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes, "fits": prediction.peak_bytes <= on.device.memory,
    }  # fmt: skip


def large(make: Any, cluster: str, batch: int) -> dict[str, Any]:
    start = time.perf_counter()
    graph = make(batch)
    captured = time.perf_counter()
    parameters = sum(graph.spec(f"param:{name}").numel for name in graph.names("param"))
    figures: dict[str, Any] = {"parameters": parameters, "nodes": len(graph.nodes), "capture_seconds": captured - start}
    figures |= timed_search(graph, cluster)
    figures["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    harness.say(f"{make.__name__}: {figures}")
    return figures


def run(quick: bool) -> dict[str, Any]:
    depths, devices = (DEPTHS[:3], DEVICES[:2]) if quick else (DEPTHS, DEVICES)
    graph = llama(2 if quick else 32, 256)
    result: dict[str, Any] = {"meshes": by_mesh(graph), "depth": {}, "devices": {}, "large": {}}
    for layers in depths:
        step = llama(layers, 256)
        start = time.perf_counter()
        ShardingProblem(problem_of(step), Pricer(tutti.Cluster.parse("h100:32x8"), MESHES["h100:32x8"])).choose()
        result["depth"][layers] = time.perf_counter() - start
        harness.say(f"{layers} layers: {result['depth'][layers]:.1f} s")
    for count in devices:
        result["devices"][count] = timed_search(llama(2, count), f"h100:{count // 8}x8" if count > 8 else "h100:8")
        harness.say(f"{count} devices: {result['devices'][count]}")
    if not quick:
        result["large"]["gpt_200b"] = large(gpt_200b, "h100:512x8", 4096)
        result["large"]["moe_1t"] = large(moe_1t, "h100:512x8", 4096)
        draw(result, Path(harness.RESULTS) / "search_time.svg")
    return result


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True)
    left.plot(list(result["depth"]), list(result["depth"].values()), "o-")
    left.set(xlabel="layers", ylabel="seconds", title="one mesh, 32 x 8", ylim=(0, None), xscale="log")
    counts = list(result["devices"])
    right.plot(counts, [result["devices"][n]["seconds"] for n in counts], "o-")
    right.set(xlabel="devices", title="all meshes of two axes", xscale="log")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    harness.main(run, __file__)
