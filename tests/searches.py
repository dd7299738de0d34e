"""A search for one captured graph, with plans judged operator by operator."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers

import tutti
from tutti.hardware.device import Outer
from tutti.ir.step_graph import StepGraph
from tutti.lower.variants.vary import vary
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.search.search import Search
from tutti.sim.planning import Simulator


def wide(batch: int = 16, layers: int = 2, length: int = 1024, **options) -> StepGraph:
    """A Llama whose operators are worth more than their launch."""
    config = transformers.LlamaConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=5632, vocab_size=8192
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.empty(batch, length, dtype=torch.long)
    return tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()), **options)


def alone(name: str) -> tutti.Cluster:
    """Devices that stand still while they communicate, with nothing outside of their memory: as the costs know them."""
    cluster = tutti.Cluster.parse(name)
    beside = Outer(0, 1, 1, "nothing lies outside of it")
    return tutti.Cluster(replace(cluster.device, overlaps=False, beside=beside), cluster.levels)


def search(graph: StepGraph, cluster: tutti.Cluster | str, **options) -> Search:
    parsed = tutti.Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    batch = next((graph.spec(f"batch:{name}").shape[0] for name in graph.names("batch")), 1)
    return Search(lambda count, variant: vary(graph, variant), batch, parsed, Simulator("O0"), **options)


def predicted(graph: StepGraph, cluster: tutti.Cluster | str, name: str, accumulate: int = 1) -> Plan:
    """A textbook plan with its prediction."""
    parsed = tutti.Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    plan = Planner(graph, parsed, accumulate=accumulate).named(name)
    return plan.replace(prediction=Simulator("O0")(graph, plan, parsed))
