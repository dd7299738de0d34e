"""Whether the planner's choice is the fastest plan, and whether predictions rank plans as measurements do.

For models of several kinds on two and on four Gloo processes of this machine, all plans of a case (see
`plan_regret_cases.py`) are run in turns, round by round, and predicted on the calibrated cluster: `simulated` by
`tutti.run.simulated.step.dry_run`, `estimated` by what the search goes by. A step takes as long as its slowest rank;
of the rounds the lower quartile counts, since other programs only ever add. By case:

- `regret`: measured time of the chosen plan over that of the fastest. `regret of simulated`, `... of estimated`: of
  the plan that these would choose from the same ones.
- `correlation`: Spearman's, of predicted and measured times.
- `ratio`: median of predicted over measured.

Without a calibration of this machine one is made first (`tutti calibrate`). What was measured is kept in
~/.cache/tutti/plan_regret and used again for the same plans, so that a run can be resumed; delete it to measure anew.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from scipy.stats import spearmanr

import harness
import tutti
from gloo import Pool
from plan_regret_cases import CASES, QUICK, Case, content, model_of, plans_of
from tutti.cluster import Cluster, machine
from tutti.cluster.command import command as calibrate
from tutti.cluster.local import calibrated
from tutti.graph.step_graph import StepGraph
from tutti.plan.estimate import Estimator
from tutti.plan.plan import Plan
from tutti.plan.problem import problem_of
from tutti.run.simulated.step import dry_run

KEPT = machine.FOLDER / "plan_regret"
ROUNDS, QUICK_ROUNDS = 12, 4
SECONDS = 0.3  # of steps in a turn, at least one
BY = ("simulated", "estimated")
PREDICTED, MEASURED = "predicted", "measured, seconds a step"


# -- in each process ---------------------------------------------------------------------------------------------------

STEPS: list[tuple[Any, Any]] = []  # of a plan: the step, and how many fit in a turn


def prepare(model_name: str, plan: str, level: str) -> float:
    """Make the step of a plan and warm it; seconds of one."""
    model, batch, loss = model_of(model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = tutti.parallelize(
        model, optimizer, batch, loss=loss, cluster=f"cpu:{dist_size()}", plan=Plan.from_json(plan), level=level
    )
    STEPS.append((step, batch))
    times = [timed(step, batch, 1) for _ in range(3)]
    return min(times)


def dist_size() -> int:
    from tutti.run.runtime import join_job

    return join_job(torch.device("cpu"))


def timed(step: Any, batch: Any, runs: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(runs):
        step(batch)
    return (time.perf_counter() - start) / runs


def turns(order: list[tuple[int, int]]) -> list[float]:
    """Of each (plan, runs): seconds of a step."""
    return [timed(*STEPS[i], runs) for i, runs in order]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(case: Case, plans: dict[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by plan and round, the slowest rank's; kept for the next time."""
    keys = {name: hashlib.sha1(content(plan).encode()).hexdigest()[:16] for name, plan in plans.items()}
    file = KEPT / f"{case} {torch.__version__}.json".replace(" ", "-")
    known = json.loads(file.read_text()) if file.exists() else {}
    if not set(keys.values()) <= set(known) or any(len(known[k]) < rounds for k in keys.values()):
        known = dict(zip(keys.values(), _in_turns(case, plans, rounds), strict=True))
        machine.write(file, json.dumps(known))
    return {name: known[key] for name, key in keys.items()}


def _in_turns(case: Case, plans: dict[str, Plan], rounds: int) -> list[list[float]]:
    pool = Pool(case.processes)
    try:
        about = []
        for name, plan in plans.items():
            about.append(max(pool.run(prepare, case.model, plan.to_json(), case.level)))
            harness.say(f"{case}: {name}, about {1e3 * about[-1]:.0f} ms")
        found: list[list[float]] = [[] for _ in plans]
        for i in range(rounds):
            order = [(j % len(about), max(1, round(SECONDS / about[j % len(about)]))) for j in range(i, i + len(about))]
            by_rank = pool.run(turns, order)
            for (j, _), *times in zip(order, *by_rank, strict=True):
                found[j].append(max(times))
            best = min(range(len(found)), key=lambda j: found[j][-1])
            harness.say(f"{case}: round {i + 1} of {rounds}, fastest {list(plans)[best]}")
    finally:
        pool.close()
    return found


def lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


# -- predicting --------------------------------------------------------------------------------------------------------


def predicted(case: Case, graph: StepGraph, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step, by who says so."""
    estimate = Estimator(graph, problem_of(graph), cluster).predict(plan)
    return {
        "simulated": dry_run(graph, plan, cluster, case.level).seconds,
        "estimated": estimate.step_seconds,
    }


def cluster_of(processes: int) -> Cluster:
    threads = machine.threads_of(processes, 1)
    found = calibrated(processes, threads, "cpu")
    if found is None:
        harness.say(f"calibrating {processes} processes")
        calibrate(processes, threads, kind="cpu")
        found = calibrated(processes, threads, "cpu")
        assert found, "a calibration that was just made"
    return found


def judged(case: Case, rounds: int) -> dict[str, Any]:
    model, batch, loss = model_of(case.model)
    graph = tutti.capture(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4), loss)
    cluster = cluster_of(case.processes)
    plans = plans_of(graph, cluster)
    times = measured(case, plans, rounds)
    rows = []
    for name, plan in plans.items():
        row = {"plan": name, "mesh": dict(plan.mesh), "measured": lower_quartile(times[name]), "rounds": times[name]}
        rows.append(row | predicted(case, graph, plan, cluster))
    rows.sort(key=lambda row: row["measured"])
    best = rows[0]["measured"]
    result: dict[str, Any] = {
        "model": case.model, "processes": case.processes, "level": case.level, "parameters": _size(graph),
        "regret": next(r["measured"] for r in rows if r["plan"].startswith("auto")) / best,
    }  # fmt: skip
    for by in BY:
        pairs = [(row[by], row["measured"]) for row in rows]
        result[by] = {
            "regret": min(rows, key=lambda row: row[by])["measured"] / best,
            "correlation": float(spearmanr(*zip(*pairs, strict=True)).statistic),
            "ratio": statistics.median(p / m for p, m in pairs),
        }
    harness.say(
        f"{case}: regret {result['regret']:.3f}; "
        + "; ".join(f"{by} {', '.join(f'{k} {v:.3f}' for k, v in result[by].items())}" for by in BY)
    )
    for row in rows:
        said = ", ".join(f"{by} {row[by] / row['measured']:.2f} of it" for by in BY)
        harness.say(f"    {1e3 * row['measured']:8.1f} ms, {said}: {row['plan']}")
    return result | {"plans": rows}


def _size(graph: StepGraph) -> int:
    return sum(graph.spec(f"param:{name}").numel for name in graph.names("param"))


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    cases = [judged(case, QUICK_ROUNDS if quick else ROUNDS) for case in (QUICK if quick else CASES)]
    if not quick:
        draw(cases, harness.RESULTS / "plan_regret.svg")
    return {"median": _medians(cases), "cases": cases}


def _medians(cases: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"regret": statistics.median(case["regret"] for case in cases)}
    for by in BY:
        found[by] = {key: statistics.median(case[by][key] for case in cases) for key in cases[0][by]}
    return found


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    """Predicted against measured, a panel for each case, the chosen plan filled."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    columns = 4
    lines = -(-len(cases) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3 * columns, 2.8 * lines), squeeze=False)
    for at in axes.flat[len(cases) :]:
        at.axis("off")
    for at, case in zip(axes.flat, cases, strict=False):
        xs = [row["measured"] for row in case["plans"]]
        ends = min(xs) / 1.5, max(xs) * 1.5
        at.plot(ends, ends, color="0.8")
        for by, color in zip(BY, ("C0", "C1"), strict=True):
            at.plot(xs, [row[by] for row in case["plans"]], "o", mfc="none", color=color, label=by)
            chosen = next(row for row in case["plans"] if row["plan"].startswith("auto"))
            at.plot(chosen["measured"], chosen[by], "o", color=color)
        title = f"{case['model']}, {case['processes']} processes, {case['level']}"
        at.set(xscale="log", yscale="log", title=f"{title}\nregret {case['regret']:.2f}")
    axes[-1, 0].set(xlabel="measured, seconds", ylabel="predicted")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
