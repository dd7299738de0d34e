"""Pipelines on a clock: where a model is cut, and what that is worth on a large cluster.

- `cuts`: a T5 of 24 encoder and 24 decoder layers (hidden 1024, the decoder's layers dearer by their cross attention,
  and a head that costs as much as several) in 4, 6 and 8 stages on V100s: the searched cut against stages of equally
  many layers, both with 1F1B, and against the schedule that is found for the searched one.
- `large`: a T5 of 200 billion parameters (48 + 48 layers, hidden 12288) on 2,048 V100s of 32 GiB in nodes of 8, joined
  by InfiniBand: the search without pipelines, and with one of 16 stages.

Steps are simulated, level O2, float16 with float32 masters and AdamW; nothing is allocated.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
import transformers

import harness
import tutti
from tutti.ir.step_graph import StepGraph
from tutti.lower.variants.vary import vary
from tutti.plan.pipeline.candidate import PipelineCandidate
from tutti.plan.pipeline.schedule import Pipe
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.search.search import Search
from tutti.plan.search.single_stage import Flat
from tutti.plan.variant import Variant
from tutti.sim.dryrun import dry_run
from tutti.sim.planning import Simulator

FLAT = 64  # microbatches without a pipeline: with fewer nothing that is fast fits


def t5(layers: int, hidden: int, batch: int, source: int, target: int) -> StepGraph:
    config = transformers.T5Config(
        d_model=hidden, d_ff=4 * hidden, d_kv=64 if hidden < 4096 else 128, num_layers=layers,
        num_heads=hidden // (64 if hidden < 4096 else 128), vocab_size=32128, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config).to(torch.float16).train()
        ids, labels = (torch.empty(batch, n, dtype=torch.long) for n in (source, target))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return tutti.capture(model, {"input_ids": ids, "labels": labels}, optimizer, fp32_master_weights=True)


def equally(planner: Planner, plan: Plan, stages: int) -> Plan:
    """The plan with equally many layers in each stage, what stands beside them with the nearest."""
    layers = list(planner.layers.members)
    numbered = [path for path in layers if path.rpartition(".")[2].isdigit()]
    place = {path: i * stages // len(numbered) for i, path in enumerate(numbered)}
    stage_of, last = {}, 0
    for path in layers:
        stage_of[path] = last = place.get(path, last)
    return plan.replace(stages=stage_of)


def cuts(layers: int, microbatches: int) -> dict[str, Any]:
    graph, ratios = t5(layers, 1024, 4, 512, 512), {}
    for stages in (4, 6, 8):
        cluster = tutti.Cluster.parse(f"v100-32:{stages}")
        planner = Planner(graph, cluster, (), microbatches)
        inner = planner.inside(Pipe(stages)).on({"dp": 1})
        plan = PipelineCandidate(inner, Pipe(stages), cluster).plan()
        steps = {
            "searched": plan,
            "equal_layers": equally(planner, plan, stages),
            "searched_and_found": PipelineCandidate(inner, Pipe(stages, "auto"), cluster).plan(),
        }
        taken = {name: dry_run(graph, one, cluster, "O2").seconds for name, one in steps.items()}
        ratios[stages] = {name: took / taken["searched"] for name, took in taken.items()}
        harness.say(f"{stages} stages: {ratios[stages]}")
    return ratios


def large(layers: int, hidden: int, on: str, batch: int, stages: int, budget: float) -> dict[str, Any]:
    cluster = tutti.Cluster.parse(on)

    @cache
    def graph(count: int) -> StepGraph:
        return t5(layers, hidden, batch // count, 512, 512)

    def varied(count: int, variant: Variant) -> StepGraph:
        return vary(graph(count), variant)

    result: dict[str, Any] = {"parameters": sum(graph(1).spec(f"param:{n}").numel for n in graph(1).names("param"))}
    piped = {"pp": stages, "dp": cluster.size // stages // 8, "tp": 8}
    for name, mesh, count in (("flat", None, FLAT), ("pipeline", piped, None)):
        start = time.perf_counter()
        search = Search(varied, batch, cluster, Simulator("O2"), accumulate=count, mesh=mesh, budget=budget,
                        progress=harness.say)  # fmt: skip
        if mesh:
            search.ranked()
        else:
            Flat(search).search()
        plan = search.best_of_all
        prediction = plan.predicted
        result[name] = {
            "plan": plan.name, "mesh": dict(plan.mesh), "microbatches": plan.accumulate, "fits": search.fits(plan),
            "step_seconds": prediction.step_seconds, "waiting_seconds": prediction.communication_seconds,
            "bubble_seconds": prediction.bubble_seconds, "fraction_of_peak": prediction.fraction_of_peak,
            "peak_bytes": prediction.peak_bytes, "search_seconds": time.perf_counter() - start,
        }  # fmt: skip
        harness.say(f"{name}: {result[name]}")
    result["speedup"] = result["flat"]["step_seconds"] / result["pipeline"]["step_seconds"]
    return result


def run(quick: bool) -> dict[str, Any]:
    if quick:
        return {"cuts": cuts(4, 8), "large": large(4, 1024, "v100-32:2x8", 32, 2, 30)}
    return {"cuts": cuts(24, 32), "large": large(48, 12288, "v100-32:256x8", 2048, 16, 300)}


if __name__ == "__main__":
    harness.main(run, __file__)
