"""Whether the planner's choice is the fastest plan, and whether predictions rank plans as measurements do.

For models of several kinds on two and on four Gloo processes of this machine, all plans of a case (see
`plan_regret_cases.py`) are run in turns, round by round, and predicted on the calibrated cluster by the simulator
(`tutti.sim.dryrun.dry_run`), which is what the search goes by. A step takes as long as its slowest rank.
Other programs add, and more to some plans than to others: before a turn the machine is given time to fall quiet, turns
in which others took much of a core are repeated, both as long as patience lasts, and of the quietest turns the lower
quartile counts. `foreign`: the cores that others took in those, on average. By case:

- `regret`: measured time of the chosen plan over that of the fastest; `regret of all` of the one that is predicted to
  be the fastest of all that are compared.
- `correlation`: Spearman's, of predicted and measured times.
- `ratio`: median of predicted over measured.

Without a calibration of this machine one is made first (`tutti calibrate`). What was measured is kept in
~/.cache/tutti/plan_regret and used again for the same plans, so that a run can be resumed; delete it to measure anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from scipy.stats import spearmanr

import harness
import tutti
from gloo import Pool
from plan_regret_cases import CASES, QUICK, Case, content, model_of, plans_of
from tutti.cli.calibrate import command as calibrate
from tutti.hardware import Cluster, machine
from tutti.hardware.local import calibrated
from tutti.ir.step_graph import StepGraph
from tutti.lower.variants.vary import vary
from tutti.plan.plan import Plan
from tutti.sim.dryrun import dry_run
from tutti.whole_files import write_text

CACHE = machine.FOLDER / "plan_regret"
ROUNDS, QUICK_ROUNDS = 4, 2
MOST = 2  # times as many rounds, where others keep the machine busy
QUIET = 0.15  # cores that others take
PATIENCE = 240.0  # seconds that a case waits for quiet in all
SECONDS = 0.25  # of steps in a turn, at least one
FIGURES = ("regret", "regret of all", "correlation", "ratio", "foreign")


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
    from tutti.exec.runtimes.runtime import join_job

    return join_job(torch.device("cpu"))


def timed(step: Any, batch: Any, runs: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(runs):
        step(batch)
    return (time.perf_counter() - start) / runs


class Turn(NamedTuple):
    """seconds: time of a step, the slowest rank's. foreign: cores that other programs took meanwhile."""

    seconds: float
    foreign: float


def turn(i: int, runs: int) -> tuple[float, float, float, float]:
    """Measure runs of a plan: seconds of a step, this process's on a core, cores that were busy, and seconds in all."""
    begin, busy, own = time.perf_counter(), _busy(), time.process_time()
    seconds = timed(*STEPS[i], runs)
    took = time.perf_counter() - begin
    return seconds, time.process_time() - own, (_busy() - busy) / took, took


def _wait(most: float) -> float:
    """Until the machine is quiet, at most so many seconds; how many it took."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < most:
        busy = _busy()
        time.sleep(LOOK)
        if _busy() - busy < QUIET * LOOK:
            break
    return time.perf_counter() - begin


LOOK = 0.2  # seconds


def _busy() -> float:
    """Seconds that the machine's cores have worked, or that other machines on the same processor have taken."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(case: Case, plans: dict[str, Plan], rounds: int) -> dict[str, list[Turn]]:
    """The quietest turns of each plan; kept for the next time."""
    keys = {name: hashlib.sha1(content(plan).encode()).hexdigest()[:16] for name, plan in plans.items()}
    file = CACHE / f"{case} {torch.__version__}.json".replace(" ", "-")
    stored = json.loads(file.read_text()) if file.exists() else {}
    if not set(keys.values()) <= set(stored) or any(len(stored[k]) < rounds for k in keys.values()):
        stored = dict(zip(keys.values(), _in_turns(case, plans, rounds), strict=True))
        write_text(file, json.dumps(stored))
    return {name: [Turn(*turn) for turn in stored[key]] for name, key in keys.items()}


def _in_turns(case: Case, plans: dict[str, Plan], rounds: int) -> list[list[Turn]]:
    pool, names = Pool(case.processes), list(plans)
    try:
        about = []
        for name, plan in plans.items():
            about.append(max(pool.run(prepare, case.model, plan.to_json(), case.level)))
            harness.say(f"{case}: {name}, about {1e3 * about[-1]:.0f} ms")
        records: list[list[Turn]] = [[] for _ in plans]
        patience = PATIENCE
        for i in range(MOST * rounds):
            left = [j for j, turns in enumerate(records) if sum(t.foreign < QUIET for t in turns) < rounds]
            if not left:
                break
            first = i % len(left)
            for j in [*left[first:], *left[:first]]:
                patience -= _wait(patience)
                ranks = pool.run(turn, j, max(1, round(SECONDS / about[j])))
                foreign = ranks[0][2] - sum(cpu for _, cpu, _, _ in ranks) / ranks[0][3]
                records[j].append(Turn(max(seconds for seconds, *_ in ranks), max(0.0, foreign)))
            best = min(range(len(records)), key=lambda j: min(records[j]))
            quiet = statistics.mean(sum(t.foreign < QUIET for t in turns) for turns in records)
            said = f"of {rounds} quiet turns {quiet:.1f}, patience {patience:.0f} s, fastest {names[best]}"
            harness.say(f"{case}: round {i + 1}, {said}")
    finally:
        pool.close()
    return [sorted(turns, key=lambda t: t.foreign)[:rounds] for turns in records]


def lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


# -- predicting --------------------------------------------------------------------------------------------------------


def cluster_of(processes: int) -> Cluster:
    threads = machine.threads_of(processes, 1)
    cluster = calibrated(processes, threads, "cpu")
    if cluster is None:
        harness.say(f"calibrating {processes} processes")
        calibrate(processes, threads, kind="cpu")
        cluster = calibrated(processes, threads, "cpu")
        assert cluster, "a calibration that was just made"
    return cluster


def predicted(graph: StepGraph, plan: Plan, cluster: Cluster, level: str) -> float:
    """Seconds of a step."""
    return dry_run(vary(graph, plan.variant), plan, cluster, level).seconds


def judged(case: Case, rounds: int) -> dict[str, Any]:
    model, batch, loss = model_of(case.model)
    graph = tutti.capture(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4), loss)
    cluster = cluster_of(case.processes)
    plans = plans_of(graph, cluster, case.level)
    if case.level == "O2":  # each part of a random plan is unlike all others: compiling takes many minutes
        plans = {name: plan for name, plan in plans.items() if not name.startswith("random")}
    times = measured(case, plans, rounds)
    rows = []
    for name, plan in plans.items():
        seconds = [turn.seconds for turn in times[name]]
        foreign = statistics.mean(turn.foreign for turn in times[name])
        row = {"plan": name, "mesh": dict(plan.mesh), "measured": lower_quartile(seconds), "foreign": foreign}
        rows.append(row | {"predicted": predicted(graph, plan, cluster, case.level)})
    rows.sort(key=lambda row: row["measured"])
    best = rows[0]["measured"]
    result: dict[str, Any] = {
        "model": case.model, "processes": case.processes, "level": case.level, "parameters": _size(graph),
        "regret": next(row["measured"] for row in rows if chosen(row)) / best,
        "foreign": statistics.mean(row["foreign"] for row in rows),
    }  # fmt: skip
    pairs = [(row["predicted"], row["measured"]) for row in rows]
    result |= {
        "regret of all": min(rows, key=lambda row: row["predicted"])["measured"] / best,
        "correlation": float(spearmanr(*zip(*pairs, strict=True)).statistic),
        "ratio": statistics.median(p / m for p, m in pairs),
    }
    harness.say(f"{case}: {', '.join(f'{key} {result[key]:.3f}' for key in FIGURES)}")
    for row in rows:
        share = row["predicted"] / row["measured"]
        harness.say(f"    {1e3 * row['measured']:8.1f} ms, predicted {share:.2f} of it: {row['plan']}")
    return result | {"plans": rows}


def chosen(row: dict[str, Any]) -> bool:
    """Whether this is the plan that the planner chose for this cluster."""
    return "auto" in row["plan"].split(" = ")


def _size(graph: StepGraph) -> int:
    return sum(graph.spec(f"param:{name}").numel for name in graph.names("param"))


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    cases = [judged(case, QUICK_ROUNDS if quick else ROUNDS) for case in (QUICK if quick else CASES)]
    if not quick:
        draw(cases, harness.RESULTS / "plan_regret.svg")
    return {"median": _medians(cases), "cases": cases}


def _medians(cases: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(case[key] for case in cases) for key in FIGURES}


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
        at.plot(xs, [row["predicted"] for row in case["plans"]], "o", mfc="none", color="C0")
        choice = next(row for row in case["plans"] if chosen(row))
        at.plot(choice["measured"], choice["predicted"], "o", color="C0", label="chosen")
        title = f"{case['model']}, {case['processes']} processes, {case['level']}"
        at.set(xscale="log", yscale="log", title=f"{title}\nregret {case['regret']:.2f}")
    axes[-1, 0].set(xlabel="measured, seconds", ylabel="predicted")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    harness.main(run, __file__, packages=("transformers",))
