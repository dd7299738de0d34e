"""Seconds of `tutti plan` for ten models on 8 to 16,384 devices, each in a process of its own.

By request (cluster, sequences of an update x tokens):

- `nodes`: of the captured step.
- `load`: seconds from the start of the process to the model, imports included; `capture`: from there to its step.
- `warm`: seconds from the start of another process to the step, which the first one left in the cache.
- `first`: seconds from the captured step to the first plan that fits; `search`: to the end of the search.
- `cpu_seconds`, `peak_rss_bytes`: of the process. `judged`: how many plans were simulated.
- `plan`, `microbatches`, `step_seconds`: the best plan, as predicted.

`--quick` takes a Llama of 12 layers.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

START = time.perf_counter()

import harness  # noqa: E402

FOLDERS = [Path(__file__).parent / name for name in ("published_runs", "gallery_models")]


class Request(NamedTuple):
    """What is asked of `tutti plan`."""

    model: str
    cluster: str
    batch: int
    seq: int

    @property
    def config(self) -> Path:
        """The file of the model's config."""
        files = (folder / f"{self.model}.json" for folder in FOLDERS)
        return next(file for file in files if file.exists())


REQUESTS = (
    Request("llama3-8b", "h100:8", 64, 8192),
    Request("llama3-70b", "h100:32x8", 512, 8192),
    Request("llama3-405b", "h100:2048x8", 2048, 8192),
    Request("qwen3-30b", "h100:2x8", 256, 4096),
    Request("qwen3-235b", "h100:32x8", 1024, 4096),
    Request("dsv3", "h100:128x8", 8192, 4096),
    Request("mixtral-8x7b", "h100:4x8", 256, 4096),
    Request("gpt-oss-120b", "h100:8x8", 512, 4096),
    Request("t5-11b", "a100-80:4x8", 512, 512),
    Request("vit-22b", "a100-80:8x8", 4096, 224),
)
QUICK = (Request("llama3-70b-12l", "h100:4x8", 128, 8192),)


def planned(config: str, cluster: str, batch: str, seq: str, only: str = "") -> dict[str, Any]:
    """One request, in this process; with only = "capture" no more than its step."""
    from tutti.cli.plan.workload import Captured, Workload
    from tutti.hardware import Cluster
    from tutti.plan.plan import Plan
    from tutti.plan.search.search import Search
    from tutti.sim.error_bars import MEMORY, error_bar
    from tutti.sim.planning import Simulator

    target, better = Cluster.parse(cluster), []

    def note(plan: Plan) -> None:
        better.append(time.perf_counter())
        harness.say(f"{plan.name}: {plan.predicted.step_seconds:.4g} s a step")

    workload = Captured(Workload(config, int(batch), int(seq)), harness.say)
    loaded = time.perf_counter()
    nodes = len(workload.graph(1).nodes)
    captured = time.perf_counter()
    if only == "capture":
        return {"warm": captured - START}
    search = Search(workload.graph, workload.facts.batch, target, Simulator("O2"), accumulate=None, better=note,
                    progress=harness.say, error=error_bar(MEMORY, target) or 0.0)  # fmt: skip
    plan, end = search.best(5), time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "nodes": nodes, "load": loaded - START, "capture": captured - loaded, "first": better[0] - captured,
        "search": end - captured, "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024, "judged": len(search.plans), "plan": plan.name,
        "microbatches": plan.accumulate, "step_seconds": plan.predicted.step_seconds,
    }  # fmt: skip


def answer(request: Request, home: str, *only: str) -> dict[str, Any]:
    """One request in another process, with the caches of this home folder."""
    arguments = str(request.config), request.cluster, str(request.batch), str(request.seq), *only
    done = subprocess.run([sys.executable, __file__, "--plan", *arguments], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": home}, check=True)  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool) -> dict[str, Any]:
    result = {}
    for request in QUICK if quick else REQUESTS:
        with tempfile.TemporaryDirectory() as home:
            figures = answer(request, home) | answer(request, home, "capture")
        result[request.model] = {"request": f"{request.cluster}, {request.batch} x {request.seq}", **figures}
        harness.say(f"{request.model}: {figures}")
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plan"]:
        print(json.dumps(planned(*sys.argv[2:])))
    else:
        harness.main(run, __file__, ("transformers",))
