"""The largest model that trains under a budget, with and without an outer tier.

- `trained`: a Llama of growing depth in float32 with AdamW on one CPU, whose device tier is a budget of memory that the
  runtime enforces by accounting; the outer tier is mapped files. The largest is found by bisection: a depth counts when
  two real steps run. `offload` keeps optimizer state there, `offload2` parameters as well, `offload3` activations as
  well. Losses at the largest depth that needs no offload are compared. `most` bounds the search.
- `mixture`: the largest mixture of experts (Mixtral's shapes, experts over all devices, float16 with float32 masters
  and Adam moments on the host) on 8, 16 and 32 V100s of 32 GiB in DGX-2 nodes, by DryRun: the device's memory and its
  part of the host's have to do. Nothing is allocated. Step time is that of one sequence of 4096 tokens for each device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import transformers

import harness
import tutti
from tutti.exec.stores.memory_budget import OverBudget, bytes_of
from tutti.ir.step_graph import StepGraph
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run

BUDGET = "256MiB"
PLANS = ("single", "offload", "offload2", "offload3")


def llama(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1408,
        vocab_size=2048,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(layers: int, plan: str) -> dict[str, Any] | None:
    """Two real steps: losses, parameters and bytes held; None where the budget does not do."""
    gc.collect()
    model = llama(layers)
    ids = torch.randint(0, 2048, (1, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    try:
        step = tutti.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, cluster="cpu:1",
                                 plan=plan, level="O0", memory=BUDGET)  # fmt: skip
        losses = [step(batch).item() for _ in range(2)]
    except OverBudget as error:
        harness.say(f"{plan}, {layers} layers: {str(error).partition(',')[0]}")
        return None
    figures = {"layers": layers, "parameters": sum(p.numel() for p in model.parameters()), "losses": losses,
               "held_bytes": step.budgets[0].most, "outer_bytes": step.offload_store.bytes}  # fmt: skip
    resident, there = (figures[key] / 2**20 for key in ("held_bytes", "outer_bytes"))
    size = figures["parameters"] / 1e6
    harness.say(f"{plan}, {layers} layers: trains {size:.1f}M, {resident:.1f} MiB held, {there:.0f} MiB in files")
    return figures


def largest(tries: Callable[[int], Any], begin: int, most: int) -> Any:
    """What is found for the largest number that succeeds, by doubling and bisection; None where `begin` fails."""
    good, best, bad = 0, None, most + 1
    at = begin
    while bad - good > 1 and at < bad:
        if outcome := tries(at):
            good, best = at, outcome
        else:
            bad = at
        at = min(2 * good, most) if bad > most and good < most else (good + bad) // 2
        if at == good:
            break
    return best


def trained(most: int) -> dict[str, Any]:
    plans = {plan: largest(lambda n, plan=plan: train(n, plan), 4, most) for plan in PLANS}
    base = plans["single"]
    result: dict[str, Any] = {"budget_bytes": bytes_of(BUDGET), "most_layers": most, **plans}
    result["times_the_parameters"] = {p: f["parameters"] / base["parameters"] for p, f in plans.items()}
    again = {plan: train(base["layers"], plan) for plan in PLANS[1:]}
    result["losses_equal"] = all(one and one["losses"] == base["losses"] for one in again.values())
    harness.say(f"parameters: {result['times_the_parameters']}, losses equal: {result['losses_equal']}")
    return result


def mixtral(experts: int, layers: int, devices: int) -> StepGraph:
    config = transformers.MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, num_local_experts=experts, num_experts_per_tok=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(torch.float16).train()
        ids = torch.empty(devices, 4096, dtype=torch.long)
    return tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters(), lr=1e-4),
                         fp32_master_weights=True)  # fmt: skip


def simulate(experts: int, layers: int, devices: int, nodes: str, offload: str) -> dict[str, Any] | None:
    """A DryRun of the mixture; None where it does not fit."""
    graph, cluster = mixtral(experts, layers, devices), tutti.Cluster.parse(f"v100-32-sxm3:{nodes}")
    plan = Planner(graph, cluster).named(f"ep{devices}{offload}")
    prediction = dry_run(graph, plan, cluster, "O2").prediction()
    parameters = sum(graph.spec(f"param:{name}").numel for name in graph.names("param"))
    device, outside = cluster.device, cluster.device.outside
    host = sum(prediction.bytes_by_tier.values())
    fits = prediction.peak_bytes <= device.memory and host <= outside.memory
    resident, has, there, outer = (n / 2**30 for n in (prediction.peak_bytes, device.memory, host, outside.memory))
    harness.say(f"{experts} experts on {devices}{offload}: {parameters / 1e9:.1f}B, {resident:.1f} GiB of {has:.0f}, "
                f"host {there:.1f} of {outer:.0f}: {'fits' if fits else 'no'}, "
                f"{prediction.step_seconds:.2f} s")  # fmt: skip
    if not fits:
        return None
    return {
        "parameters": parameters, "experts": experts, "layers": layers, "plan": plan.name, "cluster": str(cluster),
        "step_seconds": prediction.step_seconds, "compute_seconds": prediction.compute_seconds,
        "communication_seconds": prediction.communication_seconds, "transfer_seconds": prediction.transfer_seconds,
        "device_bytes": prediction.peak_bytes, "host_bytes": host, "host_has_bytes": outside.memory,
        "host": outside.source,
    }  # fmt: skip


def mixture(devices: int, nodes: str, layers: int) -> dict[str, Any]:
    rows = {}
    for name, offload in (("device", ""), ("host", "xoffload")):
        rows[name] = largest(lambda n, offload=offload: simulate(n * devices, layers, devices, nodes, offload), 1, 64)
    return rows


def run(quick: bool) -> dict[str, Any]:
    clusters = {8: "8", 16: "16", 32: "2x16"}
    mixtures = {n: mixture(n, clusters[n], 4) for n in ([8] if quick else clusters)}
    return {"mixture": mixtures, "trained": trained(8 if quick else 32)}


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
