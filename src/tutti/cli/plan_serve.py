"""`tutti plan --serve`: how to serve a model on a cluster under a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from tutti.cli.tables import consoles, table
from tutti.hardware import Cluster
from tutti.serve.bench import poisson, trace
from tutti.serve.planning import ServingPlanner, why


def plan_serve(
    model: Annotated[str, tyro.conf.Positional],
    cluster: str,
    rate: float = 4.0,
    requests: int = 200,
    prompt: tuple[int, int] = (64, 2048),
    tokens: tuple[int, int] = (16, 512),
    trace_file: Path | None = None,
    ttft: float = 1.0,
    tpot: float = 0.05,
    budget: int = 1024,
    most: int = 128,
    top: int = 8,
    seed: int = 0,
    save: Path | None = None,
) -> None:
    """Plan how to serve a model under a load: plans, replicas, and prompts and generation together or apart.

    Needs neither the devices nor memory for the model. Predicts what `tutti bench-serve` would measure.

    Args:
        model: Folder with a config.json of transformers, or such a file.
        cluster: The devices, such as h100:8 or h100:4x8.
        rate: Requests that arrive in a second, as a Poisson process. 0 sends all at once.
        requests: Number of requests.
        prompt: Smallest and largest number of tokens in a prompt.
        tokens: Smallest and largest number of tokens of an output.
        trace_file: JSONL with `at`, `prompt` and `tokens`, instead of the four above.
        ttft: Objective: seconds to the first token.
        tpot: Objective: seconds for each further token.
        budget: Tokens of a step.
        most: Sequences that an engine runs at once.
        top: Placements to print.
        seed: Of arrivals and lengths.
        save: JSON file for all placements.
    """
    from transformers import AutoConfig

    load = trace(trace_file) if trace_file else poisson(requests, rate, prompt, tokens, seed)
    planner = ServingPlanner(AutoConfig.from_pretrained(model), Cluster.parse(cluster), budget, most)
    found = planner.outcomes(load, ttft, tpot)
    shown = table(
        "placement", "good/s", "tokens/s", "TTFT p50 ms", "p90", "TPOT p50 ms", "p90", "cache, k tokens", "busy"
    )
    for x in found[:top]:
        times = [f"{x.report.ttft.get(q, 0) * 1e3:.0f}" for q in ("p50", "p90")]
        times += [f"{x.report.tpot.get(q, 0) * 1e3:.1f}" for q in ("p50", "p90")]
        shown.add_row(str(x.placement), f"{x.report.goodput:.2f}", f"{x.report.throughput:.0f}", *times,
                      f"{x.slots / 1e3:.0f}", " ".join(f"{b:.0%}" for b in x.busy))  # fmt: skip
    consoles()[0].print(shown)
    print(why(found))
    for name, error in planner.refused.items():
        print(f"not possible: {name}: {error}")
    if save:
        save.write_text(json.dumps([{"placement": str(x.placement), **x.report.__dict__} for x in found], indent=2))
