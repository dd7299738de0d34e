"""Where the best plan waits for communication, its regions are tried in parts, and the judge decides."""

from __future__ import annotations

import pytest
import torch
import transformers

import tutti
from searches import search
from tutti.hardware.device import Link
from tutti.plan.layouts.layout import Mesh
from tutti.sim.dryrun import dry_run
from tutti.sim.planning import Simulator


def long(length: int) -> tutti.StepGraph:
    """Two layers of a Llama 7B's width, of a single sequence."""
    config = transformers.LlamaConfig(
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, intermediate_size=11008,
        vocab_size=8192, max_position_embeddings=length,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
        ids = torch.empty(1, length, dtype=torch.long)
    return tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()))


@pytest.fixture(scope="module")
def graph():
    return long(8192)


def search_at_bandwidth(graph, bandwidth: float, mesh: Mesh):
    device = tutti.Cluster.parse("a100-80:2").device
    lines: list[str] = []
    searched = search(graph, tutti.Cluster(device, ((2, Link(bandwidth, 5e-6)),)), mesh=mesh, progress=lines.append)
    searched.judge = Simulator("O2")
    return searched, searched.best(), lines


def test_one_long_sequence_is_hidden_by_its_regions(graph):
    searched, best, lines = search_at_bandwidth(graph, 25e9, {"tp": 2})
    whole = next(p for p in searched.plans if p.overlap_chunks == 1)
    assert best.name == "auto-tp2xoverlap2" and best.overlap_chunks == 2
    assert best.predicted.communication_seconds < 0.5 * whole.predicted.communication_seconds
    assert best.predicted.step_seconds < whole.predicted.step_seconds
    assert any("cannot be split into copies: the batch cannot be cut" in line for line in lines)
    again = dry_run(graph, best, searched.cluster, "O2").prediction()
    assert again == best.predicted, "what is kept of the plan is what was judged"


def test_what_costs_more_than_it_hides_is_not_taken(graph):
    searched, best, _ = search_at_bandwidth(graph, 200e9, {"tp": 2})
    parts = [p for p in searched.plans if p.overlap_chunks == 2]
    assert best.overlap_chunks == 1 and all(p.predicted.step_seconds > best.predicted.step_seconds for p in parts)
