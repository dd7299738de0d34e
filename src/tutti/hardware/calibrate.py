"""Calibration: measure this machine as a cluster, with all processes busy.

The processes share cores, caches and memory during the measurement, as they do when a plan runs.
"""

from __future__ import annotations

import itertools
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tutti.hardware import compute, exchange, machine
from tutti.hardware.collectives import MESSAGES
from tutti.hardware.curve import Curve, Grid
from tutti.hardware.device import Device, Link, Way
from tutti.hardware.threads import threads as on_threads
from tutti.hardware.timing import Clock, times
from tutti.hardware.topology import Cluster
from tutti.progress import Count, Say, silent

Display = Callable[[], AbstractContextManager[Count]]
FLOPS = 128  # FLOPs per byte: products above this are not memory-bound, so operands need not rotate


@dataclass(frozen=True)
class Effort:
    """How much to measure. window: seconds per figure. Sizes in bytes; `most` in FLOPs of a product."""

    window: float = 0.01
    products: tuple[int, ...] = (1, 8, 64, 256, 1024, 4096)
    most: float = 2.0 * 1024 * 1024 * 4096
    dtypes: tuple[str, ...] = compute.DTYPES
    add: tuple[int, ...] = tuple(1 << i for i in range(12, 28, 2))
    families: tuple[int, ...] = (1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
    collective_window: float = 0.24
    rounds: int = 3
    buffers: tuple[int, ...] = (1 << 10, *(1 << i for i in range(12, 27, 2)))


GPU = Effort(
    products=(16, 64, 256, 1024, 4096, 16384),
    most=2.0 * 16384 * 16384 * 4096,
    add=tuple(1 << i for i in range(16, 32, 2)),
    families=(1 << 18, 1 << 22, 1 << 26, 1 << 29),
    buffers=(1 << 10, *(1 << i for i in range(12, 31, 2))),
)


def calibrate(
    processes: int,
    threads: int | None = None,
    kind: str | None = None,
    effort: Effort | None = None,
    prepare: Callable[[], object] | None = None,
    display: Display | None = None,
) -> Cluster:
    """Start the processes, measure, and end them.

    threads: per process, by default the cores divided by the processes. kind: "cpu" or "cuda", by default "cuda" if
    there is a GPU. prepare: an importable function that each process calls first. display: an importable
    function, which shows the figures that are measured. Raises ValueError if the machine has
    too few devices.
    """
    kind = machine.kind_of(kind)
    if processes < 1 or (kind == "cuda" and processes > torch.cuda.device_count()):
        most = torch.cuda.device_count() if kind == "cuda" else "any number"
        raise ValueError(f"cannot calibrate {processes} processes; this machine has devices for 1 to {most}")
    threads = machine.threads_of(processes, threads)
    with tempfile.TemporaryDirectory(prefix="tutti-") as folder:
        arguments = (processes, folder, threads, kind, effort, prepare, display)
        start_processes(_process, arguments, processes, start_method="spawn")
        return Cluster.from_json(Path(folder, "cluster.json").read_text())


def _process(rank: int, processes: int, folder: str, threads: int, kind: str, effort, prepare, display) -> None:
    if prepare:
        prepare()
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        machine.keep_to_own_cores(rank, processes, threads)
    store = dist.FileStore(str(Path(folder, "store")), processes)  # pyright: ignore[reportPrivateImportUsage]
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timedelta(minutes=5))
    try:
        cluster = calibrate_here(threads, kind, effort, display)
        if rank == 0:
            Path(folder, "cluster.json").write_text(cluster.to_json())
    finally:
        dist.destroy_process_group()


def calibrate_here(threads: int, kind: str, effort: Effort | None = None, display: Display | None = None) -> Cluster:
    """The cluster formed by the ranks of this job. All call this at once. display: progress display of rank 0."""
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    effort = effort or (GPU if kind == "cuda" else Effort())
    levels = _levels()
    figures, measured = _figures(effort, levels), itertools.count()
    shown = display() if display and dist.get_rank() == 0 else nullcontext(silent)
    with on_threads(threads), shown as count:
        advance = lambda name: count(next(measured), figures, name)  # noqa: E731
        calibrated = _device(device, threads, effort, advance)
        links = [_link(group, device, threads, effort, advance) for group in _groups(levels)]
    return Cluster(calibrated, tuple(zip(levels, links, strict=True)))


class _Bench:
    """Measurements of computation: means over the ranks, which all measure at once."""

    def __init__(self, device: torch.device, threads: int, window: float, advance: Say):
        self.device, self.window, self.advance = device, window, advance
        self.clock, self.sharing = _clock(device, threads)
        self.again = 0.0  # seconds of overhead of an operator in a loop
        operators, run = compute.small(device)
        self.overhead = self.seconds("an operator", run, compute.sweep(device)) / operators
        self.again = self.seconds("an operator", compute.again(device)) / compute.REPEATS

    def seconds(self, name: str, run: compute.Figure, before: compute.Figure | None = None) -> float:
        """Seconds of a run, minus the overhead of an operator (at most nine tenths of it)."""
        self.advance(name)
        own = median(times(run, self.device, self.window, 2, self.clock, before))
        everyone = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(everyone)  # also synchronizes the ranks
        mean = self.sharing * everyone.item() / dist.get_world_size()
        return max(mean - self.again, mean / 10)

    def products(self, dtype: str, sizes: tuple[int, ...], most: float) -> tuple[Grid, float]:
        """Seconds of matrix products, and their highest FLOP/s."""
        name = f"{dtype} products"
        one = self.seconds(name, compute.matmul(compute.SMALL, dtype, self.device))
        many = self.seconds(name, compute.batched(dtype, self.device))
        call = min(one, max(0.0, (compute.BATCH * one - many) / (compute.BATCH - 1)))
        seconds = {}
        for m, k, n in compute.shapes(sizes, most):
            count = max(2 * m * k * n / FLOPS, (m * k + k * n + m * n) * getattr(torch, dtype).itemsize)
            run = compute.in_turn(partial(compute.matmul, (m, k, n), dtype, self.device), count)
            seconds[m, k, n] = self.seconds(name, run)
        return Grid.of(sizes, seconds, call), max(2 * m * k * n / t for (m, k, n), t in seconds.items())

    def transposed(self, dtype: str) -> float:
        """The slowdown of products whose first operand is transposed in memory."""
        name = f"{dtype} products"
        ways = ([self.seconds(name, compute.matmul(s, dtype, self.device, way)) for s in compute.LAYERS]
                for way in (False, True))  # fmt: skip
        return max(1.0, median(b / a for a, b in zip(*ways, strict=True)))

    def stream(self, family: str, dtype: str, sizes: tuple[int, ...]) -> Curve:
        """Seconds of a family of operators."""
        make, kind = compute.FAMILIES[family], getattr(torch, dtype)
        name = f"{dtype} {family}"
        runs = ((size, compute.in_turn(partial(make, size, kind, self.device), size, compute.COLD)) for size in sizes)
        return Curve.through([(size, self.seconds(name, run)) for size, run in runs], start=0.0)


def _device(device: torch.device, threads: int, effort: Effort, advance: Say) -> Device:
    bench = _Bench(device, threads, effort.window, advance)
    grids, transposed, efficiency, peak, streams = {}, {}, {}, {}, {}
    for dtype in effort.dtypes:
        grids[dtype], peak[dtype] = bench.products(dtype, effort.products, effort.most)
        transposed[dtype] = bench.transposed(dtype)
        for name in compute.OTHERS:
            run, flops = compute.other(name, dtype, device)
            efficiency[f"{name} {dtype}"] = flops / bench.seconds(f"{dtype} {name}", run) / peak[dtype]
        for family in compute.FAMILIES:
            sizes = effort.add if family == "add" else effort.families
            streams[f"{family} {dtype}"] = bench.stream(family, dtype, sizes)
    peak = {"float64": peak["float32"] / 2, "float16": peak["float32"]} | peak  # CPUs may have no kernels for these
    count, seconds = streams["add float32"].points[-1]
    source = machine.CALIBRATED + machine.key(device.type, dist.get_world_size(), threads)
    memory = machine.memory(device) / (_levels()[0] if device.type == "cpu" else 1)
    return Device(device.type, peak, memory, count / seconds, efficiency, bench.overhead, source,
                  products=grids, transposed=transposed, streams=streams)  # fmt: skip


def _clock(device: torch.device, threads: int) -> tuple[Clock, float]:
    """The clock for computation, and the number of processes per core.

    A process with one thread measures its CPU time, which excludes other programs, and shares the cores with the other
    processes. Others measure wall-clock time.
    """
    if device.type == "cpu" and threads == 1:
        return time.thread_time, max(1.0, _levels()[0] / machine.cores())
    return time.perf_counter, 1.0


def _link(groups: list[dist.ProcessGroup], device: torch.device, threads: int, effort: Effort, advance: Say) -> Link:
    """The link between the members of a level: the largest group spans all of them, the others two."""
    measured, (clock, sharing) = [], _clock(device, threads)
    source = f"measured: {dist.get_backend()}"
    for group in groups:
        rounds = effort.rounds if group is groups[0] else 1
        window = effort.collective_window
        points = exchange.points(group, device, effort.buffers, window, rounds, advance, clock, sharing)
        measured += [(kind, group.size(), Curve.through(measurements)) for kind, measurements in points.items()]
    if not measured:
        return Link(1e12, 0.0, source="of one member: nothing is sent")
    latency, per_byte = line(next(c for kind, _, c in measured if kind == "all_reduce").points)
    latency /= MESSAGES["all_reduce"](groups[0].size())
    ways = (Way("ring", "", 0.0, latency, 1.0),) if dist.get_backend() == "gloo" else ()
    return Link(1 / per_byte, latency, source=source, ways=ways, measured=tuple(measured))


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(alpha, beta) of the line alpha + beta x nearest to the points (x, y), by relative errors, both positive.

    The normal equations of least squares on (alpha + beta x) / y - 1.
    """
    points = list(points)
    a = b = c = d = e = 0.0
    for x, y in points:
        u, v = 1 / y, x / y
        a, b, c, d, e = a + u * u, b + u * v, c + v * v, d + u, e + v
    determinant = a * c - b * b
    alpha, beta = (d * c - e * b) / determinant, (a * e - b * d) / determinant
    floor = min(y for _, y in points) / 10
    return (alpha, beta) if alpha > floor and beta > 0 else (floor, max(e / c, 1e-15))


def _levels() -> list[int]:
    """Members of each level: processes per machine, and machines, if they are equally many."""
    hosts: list = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    counts = Counter(hosts)
    if len(counts) == 1 or len(set(counts.values())) > 1:
        return [len(hosts)]
    return [counts[hosts[0]], len(counts)]


def _groups(levels: list[int]) -> list[list[dist.ProcessGroup]]:
    """This rank's groups along each level: one over all members, and one over two if there are more.

    The ranks of all groups call the same collectives, so that all groups of a level are busy at once.
    """
    groups, stride, world = [], 1, dist.get_world_size()
    for members in levels:
        mine = []
        for size in {members: 0, **({2: 0} if members % 2 == 0 else {})}:
            for base in (b for b in range(world) if b // stride % size == 0 and size > 1):
                ranks = [base + i * stride for i in range(size)]
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    mine.append(group)
        groups.append(mine)
        stride *= members
    return groups


def _figures(effort: Effort, levels: list[int]) -> int:
    """The number of figures to measure."""
    families = len(effort.add) + (len(compute.FAMILIES) - 1) * len(effort.families)
    shapes = len(compute.shapes(effort.products, effort.most))
    rounds = sum(effort.rounds * (members > 1) + (members > 2 and members % 2 == 0) for members in levels)
    exchanged = rounds * len(MESSAGES) * len(effort.buffers)
    return 2 + len(effort.dtypes) * (shapes + 2 + 2 * len(compute.LAYERS) + families + len(compute.OTHERS)) + exchanged
