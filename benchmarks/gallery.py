"""The best plan of well-known models on four clusters, as `tutti plan` finds it.

A row for each model and cluster: the plan, its step, throughput, share of peak and memory, and the command that repeats
it. A model that does not fit has the cluster that would do instead. The configs are in benchmarks/gallery_models and
benchmarks/published_runs. Rows are written one at a time, and those of the last run are kept: delete
benchmarks/results/gallery.json to plan all again. `--quick` takes the smallest model alone.

`PRICES` of a device hour are assumed, in dollars, to compare clusters; put in your own. A search ends by its own clock
of work, so that a busy machine finds the same plans. BERT and GPT-2 are without dropout, with which attention would not
be fused.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from tutti.cli.plan.answer import bill
from tutti.cli.plan.sweep import Point, best_on
from tutti.cli.plan.workload import Captured, Workload
from tutti.hardware import Cluster

FOLDER = Path(__file__).parent
CLUSTERS = ("h100:8", "h100:32x8", "a100-80:4x8", "b200:8x8")
PRICES = {"a100-80": 1.5, "h100": 2.5, "b200": 4.5}
LIMIT = 1800.0  # seconds for a row: searches end long before, by their own clock
QUICK = "BERT large"
Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A model and its batch. amount: tokens (or images) whose cost is asked for."""

    model: str
    config: str
    batch: int
    seq: int
    amount: float = 1e12


REQUESTS = (
    Request("Llama-3 8B", "published_runs/llama3-8b.json", 512, 4096),
    Request("Mistral 7B", "gallery_models/mistral-7b.json", 512, 4096),
    Request("MPT 7B", "gallery_models/mpt-7b.json", 1024, 2048),
    Request("OLMo-2 13B", "gallery_models/olmo-2-13b.json", 512, 4096),
    Request("Phi-4", "gallery_models/phi-4.json", 512, 4096),
    Request("Mixtral 8x7B", "gallery_models/mixtral-8x7b.json", 512, 4096),
    Request("gpt-oss 20B", "published_runs/gpt-oss-20b.json", 512, 4096),
    Request("Qwen3 30B-A3B", "published_runs/qwen3-30b.json", 512, 4096),
    Request("Llama-3 70B", "published_runs/llama3-70b.json", 512, 4096),
    Request("Gemma-2 27B", "gallery_models/gemma-2-27b.json", 512, 4096),
    Request("Falcon 40B", "gallery_models/falcon-40b.json", 1024, 2048),
    Request("Qwen2.5 72B", "gallery_models/qwen2.5-72b.json", 512, 4096),
    Request("BERT large", "gallery_models/bert-large.json", 4096, 512),
    Request("GPT-2 XL", "gallery_models/gpt2-xl.json", 2048, 1024),
    Request("T5 11B", "published_runs/t5-11b.json", 4096, 512),
    Request("ViT 22B", "gallery_models/vit-22b.json", 4096, 2, 1e9),
    Request("gpt-oss 120B", "gallery_models/gpt-oss-120b.json", 512, 4096),
    Request("Qwen3 235B-A22B", "gallery_models/qwen3-235b.json", 512, 4096),
    Request("Llama-3 405B", "published_runs/llama3-405b.json", 512, 4096),
    Request("DeepSeek-V3", "published_runs/dsv3.json", 512, 4096),
)


def command(request: Request, cluster: str) -> str:
    """The command that repeats a row, from the root of the repository."""
    price = PRICES[Cluster.parse(cluster).device.name]
    return (
        f"tutti plan --model benchmarks/{request.config} --cluster {cluster} --batch {request.batch} "
        f"--seq {request.seq} --tokens {request.amount:g} --price {price:g}"
    )


def row_of(request: Request, cluster: str, point: Point, parameters: int, took: float) -> Row:
    """A row of the result: figures of the plan, or why there is none and which cluster has one."""
    row: Row = {
        "model": request.model, "parameters": parameters, "cluster": cluster, "devices": point.cluster.size,
        "batch": request.batch, "seq": request.seq, "took": round(took, 1), "command": command(request, cluster),
    }  # fmt: skip
    if point.plan is None:
        return row | {"fits": "no", "enough": point.enough, "why": point.why}
    prediction, price = point.plan.predicted, PRICES[point.cluster.device.name]
    total = bill(point.rate, point.cluster, request.amount, price)
    return row | {
        "plan": point.plan.name, "microbatches": point.plan.accumulate, "fits": point.fits, "unit": point.work.unit,
        "step_seconds": prediction.step_seconds, "per_second": point.rate,
        "fraction_of_peak": prediction.fraction_of_peak, "waiting_seconds": prediction.communication_seconds,
        "bubble_seconds": prediction.bubble_seconds, "peak_bytes": prediction.peak_bytes, "amount": request.amount,
        "device_hours": total.device_hours, "price": price, "cost": total.cost,
    }  # fmt: skip


def rows_of(request: Request, clusters: Sequence[str]) -> Any:
    """The rows of a model, one at a time. What is captured is shared by the clusters."""
    captured = Captured(Workload(str(FOLDER / request.config), request.batch, request.seq), lambda _: None)
    for cluster in clusters:
        start = time.perf_counter()
        point = best_on(captured, Cluster.parse(cluster), "O2", LIMIT, lambda _: None)
        yield row_of(request, cluster, point, captured.facts.parameters, time.perf_counter() - start)


def run(quick: bool) -> dict[str, Any]:
    file = harness.RESULTS / "gallery.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() and not quick else []
    done = {(row["model"], row["cluster"]) for row in rows}
    for request in REQUESTS:
        left = [c for c in CLUSTERS if (request.model, c) not in done]
        if quick and request.model != QUICK:
            continue
        for row in rows_of(request, left) if left else ():
            rows.append(row)
            answer = row.get("plan") or f"no plan; {row['enough'] or 'no cluster found'} would do"
            harness.say(f"{row['model']} on {row['cluster']}: {answer} ({row['took']:.0f} s)")
            if not quick:
                file.write_text(json.dumps({"benchmark": "gallery", "quick": False, **harness.environment(PACKAGES),
                                            "rows": rows}, indent=2) + "\n")  # fmt: skip
        gc.collect()
    order = {request.model: i for i, request in enumerate(REQUESTS)}
    rows.sort(key=lambda row: (order[row["model"]], CLUSTERS.index(row["cluster"])))
    return {"rows": rows}


PACKAGES = ("transformers",)

if __name__ == "__main__":
    harness.main(run, __file__, packages=PACKAGES)
