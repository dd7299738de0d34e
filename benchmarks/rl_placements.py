"""Whether `tutti plan --rl` chooses the fastest placement of an agent's training, and what placements are worth.

Ten cases at level `eager`: algorithms in pure environments, in MuJoCo, in gymnasium, and in a slow one of the host.
Of each case the costs of the fragments are measured, in seconds on a core. Then all placements on 1, 2 and 4 ranks, as
processes and as threads of one process, are run in turns, round by round, and `choice` is the time of the chosen one
over that of the fastest, each the median of its turns. `choice_of_same` leaves placements out that learn from older
policies (`async`, `server`), which the planner chooses only if they are faster by a tenth.

Which placement is the fastest depends on what other programs do, too: before each round the planner's measurement of it
is repeated (`stretch`: how long equal work takes in 1, 2 and 4 processes at once; 1, 1 and 2 on an idle machine of two
cores), and the choice is that for the mean of these. `idle_choice` is the choice for an idle machine. `foreign`: the
cores that others took, on average. What was measured is kept in ~/.cache/tutti/rl_placements, and each further run adds
a pass of rounds to it; delete it to measure anew.

`scaling`: the same model with one rank on each of up to 64 devices, in an environment where acting is most of the work.
The devices are cores like those of this machine, joined by 10 Gb/s Ethernet between nodes of 8 cores.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist

import harness
from gloo import Pool
from tutti.cli.plan.rl import draw
from tutti.hardware import Cluster, machine
from tutti.rl.core.vector import VectorEnv
from tutti.rl.placement import links
from tutti.rl.placement.forecast import OLDER, Forecast, Machine, chosen, forecasts
from tutti.rl.placement.fragments import costs
from tutti.rl.placement.job import RunPlacement
from tutti.rl.placement.placement import Placed

CACHE = machine.FOLDER / "rl_placements"
ROUNDS, QUICK_ROUNDS = 4, 2
SLOW = 2.0  # times the fastest: such placements take no turns in further passes
SECONDS = 0.2  # of a turn, at least one iteration
NEAR = 1.05


@dataclass(frozen=True)
class Case:
    algorithm: str
    env: str
    options: dict[str, Any]
    level: str = "eager"

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.env.partition(':')[2] or self.env} n{self.options['n_envs']} {self.level}"


OFF = {"learning_starts": 64, "buffer_size": 4_096}
CASES = (
    Case("PPO", "CartPole-v1", {"n_envs": 16, "n_steps": 64, "batch_size": 256, "n_epochs": 4}),
    Case("A2C", "CartPole-v1", {"n_envs": 64, "n_steps": 16}),
    Case("IMPALA", "CartPole-v1", {"n_envs": 1024, "n_steps": 20}),
    Case("SAC", "Pendulum-v1", {"n_envs": 4, "n_steps": 4, "batch_size": 64, **OFF}),
    Case("DQN", "CartPole-v1", {"n_envs": 8, "n_steps": 16, "gradient_steps": 16, "batch_size": 64, **OFF}),
    Case("MAPPO", "simple_spread_v3", {"n_envs": 32, "n_steps": 25, "batch_size": 600, "n_epochs": 2}),
    Case("PPO", "HalfCheetah-v5", {"n_envs": 16, "n_steps": 64, "batch_size": 256, "n_epochs": 4}),
    Case("A2C", "slow_env:Slow-v0", {"n_envs": 8, "n_steps": 16}),
    Case("TD3", "Pendulum-v1", {"n_envs": 8, "n_steps": 4, "gradient_steps": 8, "batch_size": 64, **OFF}),
    Case("A2C", "gymnasium:CartPole-v1", {"n_envs": 16, "n_steps": 16}),
)
QUICK = (CASES[7],)
SCALED = Case("A2C", "slow_env:Slow-v0", {"n_envs": 64, "n_steps": 16})
NODES = "cpu:8x8"


# -- in each process ---------------------------------------------------------------------------------------------------

PLACED: dict[str, Placed] = {}


def prepare(case: Case, place: RunPlacement) -> float:
    """Make a placement and run it until it learns; seconds of an iteration."""
    torch.set_num_threads(1)
    placed = Placed(case.algorithm, case.env, place.placement, place.ranks, level=case.level, **case.options)
    PLACED[str(place)] = placed
    warm = case.options.get("learning_starts", 0)
    placed.learn(warm + steps_of(case))
    return min(turn(place, case, 1) for _ in range(2))


def turn(place: RunPlacement, case: Case, iterations: int) -> float:
    """Seconds of an iteration."""
    if place.processes > 1:
        dist.barrier()
    begin = time.perf_counter()
    PLACED[str(place)].learn(iterations * steps_of(case))
    return (time.perf_counter() - begin) / iterations


def forget() -> None:
    for placed in PLACED.values():
        if isinstance(placed.agent.env, VectorEnv):
            placed.agent.env.close()
    PLACED.clear()


def steps_of(case: Case) -> int:
    return case.options["n_envs"] * case.options["n_steps"]


# -- measuring ---------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """seconds: time of an iteration, the slowest process's. foreign: cores that other programs took meanwhile."""

    seconds: float
    foreign: float


def measured(
    case: Case, places: list[RunPlacement], pools: dict[int, Pool], rounds: int
) -> tuple[dict[RunPlacement, list[Turn]], dict]:
    """The turns of each placement, and the stretch of work in each round."""

    def on(place: RunPlacement, function: Any, *args: Any) -> float:
        return function(*args) if place.processes == 1 else max(pools[place.processes].run(function, *args))

    lasts, times, stretch = {}, {place: [] for place in places}, {count: [] for count in (1, *pools)}
    for place in places:
        lasts[place] = on(place, prepare, case, place)
    for i in range(rounds):
        first = i % len(places)
        for place in [*places[first:], *places[:first]]:
            count, begin, before = max(1, math.ceil(SECONDS / lasts[place])), time.perf_counter(), _foreign()
            seconds = on(place, turn, place, case, count)
            times[place].append(Turn(seconds, (_foreign() - before) / (time.perf_counter() - begin)))
        for each, x in links.stretch(times=8).items():
            stretch[each].append(x)
    forget()
    for pool in pools.values():
        pool.run(forget)
    return times, stretch


def seconds_of(turns: list[Turn]) -> float:
    return statistics.median(t.seconds for t in turns)


def _foreign() -> float:
    """Seconds that cores have worked for others than this process and its descendants."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    parents, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], used[int(folder.name)] = int(words[1]), int(words[11]) + int(words[12])
    own, children = {os.getpid()}, True
    while children:
        children = {pid for pid, parent in parents.items() if parent in own and pid not in own}
        own |= children
    return (user + nice + system + irq + softirq + steal - sum(used.get(pid, 0) for pid in own)) / tick


def judged(case: Case, here: Machine, pools: dict[int, Pool], rounds: int, file: Path | None) -> dict[str, Any]:
    measured_costs = costs(case.algorithm, case.env, case.options, case.level, harness.say)
    stored = json.loads(file.read_text()) if file and file.exists() else {"times": {}, "stretch": {}}
    places = [x.place for x in forecasts(measured_costs, here)]
    times = {place: [Turn(*turn) for turn in stored["times"].get(str(place), [])] for place in places}
    best = min((seconds_of(turns) for turns in times.values() if turns), default=math.inf)
    again = [place for place in places if not times[place] or seconds_of(times[place]) < SLOW * best]
    again = again if rounds else []
    more, stretch = measured(case, again, pools, rounds)
    for place, turns in more.items():
        times[place] += turns
    stretch = {count: stored["stretch"].get(str(count), []) + each for count, each in stretch.items()}
    if file:
        saved = {str(place): turns for place, turns in times.items()}
        file.write_text(json.dumps({"times": saved, "stretch": stretch}))
    now = {count: statistics.fmean(each) for count, each in stretch.items()}
    ranked = forecasts(measured_costs, replace(here, stretch=now))
    pick, idle = chosen(ranked), chosen(forecasts(measured_costs, replace(here, stretch={})))
    rates = {place: steps_of(case) / seconds_of(turns) for place, turns in times.items()}
    fastest = max(rates, key=lambda place: rates[place])
    same = max(rate for place, rate in rates.items() if place.placement not in OLDER or place == pick.place)
    row = {
        "chosen": str(pick.place), "fastest": str(fastest), "choice": rates[fastest] / rates[pick.place],
        "choice_of_same": same / rates[pick.place], "steps_per_second": rates[pick.place], "predicted": pick.rate,
        "times_fused": rates[pick.place] / rates[RunPlacement()], "idle_choice": str(idle.place),
        "correlation": _spearman([x.rate for x in ranked], [rates[x.place] for x in ranked]),
        "stretch": [round(now[count], 2) for count in sorted(now)],
        "foreign": statistics.fmean(t.foreign for turns in times.values() for t in turns),
        "turns": len(times[pick.place]),
    }  # fmt: skip
    harness.say(f"{case.name}: {row}")
    return {**row, "placements": [_row(x, rates[x.place]) for x in ranked]}


def _row(x: Forecast, rate: float) -> dict[str, Any]:
    return {"placement": str(x.place), "predicted": round(x.rate), "measured": round(rate), "bottleneck": x.bottleneck}


def _spearman(a: list[float], b: list[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)


def scaling(quick: bool) -> dict[str, Any]:
    """Throughput over devices, predicted."""
    here = links.this_machine()
    measured_costs = costs(SCALED.algorithm, SCALED.env, SCALED.options, SCALED.level, harness.say)
    there = links.of_cluster(Cluster.parse(NODES), here)
    ranked = forecasts(measured_costs, there)
    fused = next(x for x in ranked if x.place == RunPlacement())
    rows = {}
    for count in (2, 4, 8, 16, 32, 64):
        fits = [x for x in ranked if x.place.ranks <= count]
        actors = next(x for x in fits if x.place.placement == "actors")
        pick = chosen(fits)
        rows[count] = {"chosen": str(pick.place), "steps_per_second": pick.rate, "times_fused": pick.rate / fused.rate,
                       "actors_times_fused": actors.rate / fused.rate}  # fmt: skip
    if not quick:
        draw(ranked, harness.RESULTS / "rl_placements.svg", f"{SCALED.name}, {NODES}, predicted")
    return {"fused": fused.rate, "notes": list(there.notes), "devices": rows}


def run(quick: bool) -> dict[str, Any]:
    here, rounds = links.this_machine(), QUICK_ROUNDS if quick else ROUNDS
    CACHE.mkdir(parents=True, exist_ok=True)
    pools = {count: Pool(count) for count in links.PROCESSES}
    cases = {}
    try:
        for case in QUICK if quick else CASES:
            harness.say(case.name)
            file = None if quick else CACHE / f"{case.name}.json".replace(" ", "-")
            cases[case.name] = judged(case, here, pools, rounds, file)
    finally:
        for pool in pools.values():
            pool.close()
    right, same = (sum(row[key] <= NEAR for row in cases.values()) for key in ("choice", "choice_of_same"))
    table = [{"case": name, **{k: x for k, x in row.items() if k != "placements"}} for name, row in cases.items()]
    return {
        "cores": here.cores, "right": right, "right_of_same": same, "cases": len(cases), "summary": table,
        "placements": [{"case": name, **x} for name, row in cases.items() for x in row["placements"]],
        "scaling": scaling(quick),
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__)
