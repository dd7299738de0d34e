"""What messages between fragments cost on this machine, and on clusters (`tutti.rl.forecast.Machine`).

This machine is measured once, in jobs of two and of four processes; the figures are kept beside those of
`tutti calibrate`. Other clusters have the latencies and bandwidths of their links.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gymnasium import spaces

from tutti.exec.runtime import join_job
from tutti.hardware import Cluster, machine
from tutti.launch.launch import launch
from tutti.rl.exchange import receive, send
from tutti.rl.forecast import Line, Machine
from tutti.rl.ranks import Ranks
from tutti.rl.vector import Moved, VectorEnv

CACHE = machine.FOLDER / "rl-messages.json"
SMALL, LARGE = 1 << 6, 1 << 20  # float32 numbers in a message
TIMES = 40
PROCESSES = (2, 4)


def this_machine(
    most: int = 4, progress: Callable[[str], None] = lambda _: None, cache: Path | None = CACHE
) -> Machine:
    """This machine with ranks up to `most`. Takes half a minute for the first time."""
    key = machine.key("cpu", 1, 1)
    known = {}
    if cache is not None and cache.exists():
        known = json.loads(cache.read_text())
    if key not in known:
        known[key] = _measured(progress)
        if cache is not None:
            machine.write(cache, json.dumps(known, indent=2))
    table = known[key]
    lines: dict[str, dict[int, Line]] = {
        name: {int(n): Line(*x) for n, x in table[name].items()} for name in ("mean", "meet")
    }
    return Machine(
        machine.cores(), most, Line(*table["message"]), **lines, pipe=table["pipe"], beside=table["beside"],
        name=f"this machine, {machine.cores()} cores", notes=("all figures are measured here",),
    )  # fmt: skip


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
    return Machine(
        cluster.size, cluster.size, message, means or here.mean, here.meet, here.pipe, 1.0, str(cluster), notes
    )


def _measured(progress: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {"mean": {}, "meet": {}}
    for count in PROCESSES:
        progress(f"measuring messages between {count} processes")
        told = launch(in_job, count)[0]
        found["mean"][count] = told["mean"]
        if count == PROCESSES[0]:
            found |= {name: told[name] for name in ("message", "beside")}
    progress("measuring threads and worker processes")
    for count in PROCESSES:
        small, large = (_meeting(count, size) for size in (SMALL, LARGE // 16))
        found["meet"][count] = _line(small, large, LARGE // 16)
    found["pipe"] = _pipe()
    return found


def in_job() -> dict[str, Any]:
    """In each process of a job: a message, a mean, and work beside other work."""
    torch.set_num_threads(1)
    count = join_job(torch.device("cpu"))
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    trips = []
    for size in (SMALL, LARGE):
        x = {"x": torch.zeros(size)}

        def trip(x: dict = x) -> None:
            if rank == 0:
                send(x, 1)
                receive(x, 1)
            elif rank == 1:
                receive(x, 0)
                send(x, 0)

        trips.append(_typical(trip) / 2)
    found["message"] = _line(*trips, LARGE)
    means = []
    for size in (SMALL, LARGE):
        x, out = torch.zeros(1, size), [torch.empty(1, size) for _ in range(count)]
        means.append(_typical(lambda x=x, out=out: dist.all_gather(out, x)))
    found["mean"] = _line(*means, LARGE)
    alone = []
    for turn in range(count):
        dist.barrier()
        if turn == rank:
            alone = [_work() for _ in range(10)]
    dist.barrier()
    beside = [_work() for _ in range(10)]
    found["beside"] = max(min(beside) / min(alone), 1.0)
    return found


def _work() -> float:
    """Seconds of the process on its core: small products, as networks of agents have them."""
    x, begin = torch.ones(64, 64), time.process_time()
    for _ in range(300):
        x = torch.tanh(x @ x)
    return time.process_time() - begin


def _meeting(count: int, size: int) -> float:
    """Seconds of a mean of so many threads."""
    ranks, x = Ranks(count), torch.zeros(size)

    def work(i: int) -> float:
        return _typical(lambda: ranks.mean(i, x))

    return median(ranks.run(work))


def _typical(run: Callable[[], object]) -> float:
    """The lower quartile of several times, in seconds: of what nothing else has disturbed."""
    times = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)[TIMES // 4]


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
    from tutti.rl.adapt.workers import Workers

    workers = Workers(Still, 4, 2)
    try:
        workers.reset(0)
        return _typical(lambda: workers.step(np.zeros(4, np.int64))) / 2
    finally:
        workers.close()
