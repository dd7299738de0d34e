"""Costs of messages between fragments on this machine, and on clusters (`tutti.rl.placement.forecast.Machine`).

Messages on this machine are measured once, in jobs of two and of four processes, and kept beside the figures of
`tutti calibrate`; how much of the cores other programs take is measured each time. Other clusters have the latencies
and bandwidths of their links.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gymnasium import spaces

from tutti.exec.runtimes.runtime import join_job
from tutti.hardware import Cluster, machine
from tutti.launch.launch import launch
from tutti.progress import Say, silent
from tutti.rl.core.vector import Moved, VectorEnv
from tutti.rl.placement.exchange import receive, send
from tutti.rl.placement.forecast import Line, Machine
from tutti.rl.placement.ranks import Ranks
from tutti.whole_files import write_text

CACHE = machine.FOLDER / "rl-messages.json"
SMALL, LARGE = 1 << 6, 1 << 20  # float32 numbers in a message
TIMES = 40  # repetitions of a measurement
PROCESSES = (2, 4)


def this_machine(most: int = 4, progress: Say = silent, cache: Path | None = CACHE) -> Machine:
    """Measure this machine with up to `most` ranks, including its present load. The first call takes half a minute."""
    key = machine.key("cpu", 1, 1)
    tables = {}
    if cache is not None and cache.exists():
        tables = _read_cache(cache)
    if key not in tables:
        tables[key] = _measured(progress)
        if cache is not None:
            write_text(cache, json.dumps(tables, indent=2))
    table, now = tables[key], stretch()
    lines = {name: {int(n): Line(*x) for n, x in table[name].items()} for name in ("mean", "meet")}
    name = f"this machine, {machine.cores()} cores"
    said = ", ".join(f"{x:.2f} times as long in {n}" for n, x in now.items())
    notes = ("all figures are measured here", f"at present work takes {said} processes at once")
    return Machine(machine.cores(), most, Line(*table["message"]), lines["mean"], lines["meet"], table["pipe"], now,
                   name, notes)  # fmt: skip


def _read_cache(cache: Path) -> dict[str, Any]:
    """The content of a cache file; empty if it is damaged, so that everything is measured again."""
    try:
        tables = json.loads(cache.read_text())
    except ValueError:
        return {}
    return tables if isinstance(tables, dict) else {}


def of_cluster(cluster: Cluster, here: Machine) -> Machine:
    """A cluster whose links are the presets', and whose devices each run one rank."""
    link = cluster.levels[-1][1]
    means, count = {}, 2
    while count <= cluster.size:
        at = partial(cluster.time, "all_gather", stride=1, size=count)
        small, large = at(4.0 * SMALL * (count - 1)), at(4.0 * LARGE * (count - 1))
        means[count] = Line.through(4 * SMALL, small, 4 * LARGE, large)
        count *= 2
    notes = (
        f"links: {link.source}",
        "ranks run on devices of their own, which do not slow one another",
        "giving actions to a worker process takes as long as on this machine",
    )
    message = Line(link.latency, 1 / (link.bandwidth * link.efficiency))
    alone = {1 << i: 1.0 for i in range(cluster.size.bit_length())}
    return Machine(cluster.size, cluster.size, message, means or here.mean, here.meet, here.pipe, alone, str(cluster),
                   notes)  # fmt: skip


def _measured(progress: Say) -> dict[str, Any]:
    table: dict[str, Any] = {"mean": {}, "meet": {}}
    for count in PROCESSES:
        progress(f"measuring messages between {count} processes")
        timings = launch(in_job, count)[0]
        table["mean"][count] = timings["mean"]
        if count == PROCESSES[0]:
            table["message"] = timings["message"]
    progress("measuring threads and worker processes")
    for count in PROCESSES:
        small, large = (_meeting(count, size) for size in (SMALL, LARGE // 16))
        table["meet"][count] = _line(small, large, LARGE // 16)
    table["pipe"] = _pipe()
    return table


def in_job() -> dict[str, Any]:
    """Time a message between two processes, and a mean over all. Runs in each process of a separate job."""
    torch.set_num_threads(1)
    join_job(torch.device("cpu"))
    rank, trips, means = dist.get_rank(), [], []
    for size in (SMALL, LARGE):
        x, out = torch.zeros(1, size), [torch.empty(1, size) for _ in range(dist.get_world_size())]

        def trip(x: dict = {"x": x}) -> None:  # noqa: B006
            if rank == 0:
                send(x, 1)
                receive(x, 1)
            elif rank == 1:
                receive(x, 0)
                send(x, 0)

        trips.append(_typical(trip) / 2)
        means.append(_typical(lambda x=x, out=out: dist.all_gather(out, x)))
    return {"message": _line(trips[0], trips[1], LARGE), "mean": _line(means[0], means[1], LARGE)}


PIECE = """
import json, os, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, json.loads(sys.argv[1]))
for line in sys.stdin:
    busy, x = time.process_time(), 1.0
    for i in range(100_000):
        x = (x * 1.1) % 7.0
    print(time.process_time() - busy, flush=True)
"""  # some milliseconds of work for each line


def stretch(counts: tuple[int, ...] = (1, *PROCESSES), times: int = 24) -> dict[int, float]:
    """Measure the present slowdown of equal work by the number of processes that run at once, each on its own cores. On
    an idle machine with two cores 1, 1 and 2; more if other programs run. Takes a second."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(machine.cores())
    factors = {}
    for count in counts:
        places = [machine.cores_of(i, count, cores) for i in range(count)]
        pieces = [subprocess.Popen([sys.executable, "-c", PIECE, json.dumps(list(own))], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True, bufsize=1) for own in places]  # fmt: skip
        took = []
        for _ in range(times + 1):
            begin = time.perf_counter()
            for each in pieces:
                assert each.stdin and each.stdout
                each.stdin.write("work\n")
            busy = [float(each.stdout.readline()) for each in pieces if each.stdout]
            took.append((time.perf_counter() - begin) / statistics.fmean(busy))
        for each in pieces:
            each.communicate()
        factors[count] = max(statistics.fmean(took[1:]), 1.0)  # the first waits for Python to start
    return factors


def _meeting(count: int, size: int) -> float:
    """Seconds of a mean of so many threads."""
    ranks, x = Ranks(count), torch.zeros(size)

    def work(i: int) -> float:
        return _typical(lambda: ranks.mean(i, x))

    return statistics.median(ranks.run(work))


def _typical(run: Callable[[], object]) -> float:
    """The lower quartile of several times in seconds: the time of a run that nothing else has disturbed."""
    took = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        run()
        took.append(time.perf_counter() - begin)
    return sorted(took)[TIMES // 4]


def _line(small: float, large: float, count: int) -> list[float]:
    line = Line.through(4 * SMALL, small, 4 * count, large)
    return [line.fixed, line.each]


class Still(VectorEnv):
    """Environments in which nothing happens."""

    observation_space, action_space, name = spaces.Box(-1, 1, (4,)), spaces.Discrete(2), "Still"

    def __init__(self, n: int):
        self.n = n

    def reset(self, seed: int | None = None) -> np.ndarray:
        return np.zeros((self.n, 4), np.float32)

    def step(self, action: np.ndarray) -> Moved:
        no = np.zeros(self.n, bool)
        return Moved(self.reset(), np.zeros(self.n, np.float32), no, no, self.reset())


def _pipe() -> float:
    """Seconds to give one worker process its actions, and to hear of the result."""
    from tutti.rl.adapt.processes.workers import Workers

    workers = Workers(Still, 4, 2)
    try:
        workers.reset(0)
        return _typical(lambda: workers.step(np.zeros(4, np.int64))) / 2
    finally:
        workers.close()
