"""The verb `tutti calibrate`."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from tutti.hardware import machine
from tutti.hardware.calibrate import calibrate, calibrate_here, line
from tutti.hardware.curve import Curve
from tutti.hardware.device import FAMILIES
from tutti.hardware.topology import Cluster
from tutti.launch.progress import drawn_when_counted
from tutti.whole_files import write_text

SHAPES = ((512, 512, 512), (2048, 512, 2048), (1, 2048, 2048))
BYTES = (1 << 16, 1 << 22, 1 << 26)


def command(
    devices: int | None = None, threads: int | None = None, save: Path | None = None, kind: str | None = None
) -> None:
    """Measure this machine, so that predictions for it are accurate.

    Takes one to two minutes. Times matrix products over shapes, memory traffic and elementwise operators over bytes,
    and collectives over bytes, in as many concurrent processes as training will use.
    `tutti.parallelize(..., cluster="auto")` finds the default file for its number of processes. Name another file with
    `cluster="FILE.json"` or `tutti plan --cluster FILE.json`. Under torchrun, it measures the processes of the job.

    Args:
        devices: Number of processes. Default: one per GPU, or one per core without GPUs.
        threads: Threads per process. Default: the cores divided by the processes.
        save: File to write, *.json. Default: a file in ~/.cache/tutti.
        kind: cpu or cuda. Default: cuda if there is a GPU.
    """
    from tutti.analysis.allocator import keep_freed_memory  # as a training step does

    if save and save.suffix != ".json":
        raise ValueError(f"--save {save} is no .json file; cluster files are found by that suffix: --save {save}.json")
    start, kind = perf_counter(), machine.kind_of(kind)
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        keep_freed_memory()
        devices = dist.get_world_size()
        threads = machine.threads_of(devices, threads)
        cluster = calibrate_here(threads, kind, display=drawn_when_counted)
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank != 0:
            return
    else:
        devices = machine.devices(kind) if devices is None else devices
        threads = machine.threads_of(devices, threads)
        cluster = calibrate(devices, threads, kind, prepare=keep_freed_memory, display=drawn_when_counted)
    file = save or machine.calibration(kind, devices, threads)
    write_text(file, cluster.to_json())
    console = Console(highlight=False)
    for table in (_computing(cluster), _moving(cluster), *_exchanging(cluster)):
        console.print(table)
    console.print(f"{cluster}, {threads} threads each, in {perf_counter() - start:.0f} s; saved {file}")


def _computing(cluster: Cluster) -> Table:
    device = cluster.device
    table = Table("GFLOP/s of products", *("x".join(map(str, s)) for s in SHAPES), "largest", box=None)
    for dtype in device.products:
        rates = (2e-9 * m * k * n / device.matmul_seconds(1, m, k, n, dtype) for m, k, n in SHAPES)
        table.add_row(dtype, *(f"{rate:,.0f}" for rate in rates), f"{device.peak_of(dtype) * 1e-9:,.0f}")
    return table


def _moving(cluster: Cluster) -> Table:
    table = Table("GB/s, float32", *map(_bytes, BYTES), box=None)
    for family in FAMILIES:
        if f"{family} float32" in cluster.device.streams:
            rates = (1e-9 * count / cluster.device.stream_seconds(count, family) for count in BYTES)
            table.add_row(family, *(f"{rate:.1f}" for rate in rates))
    return table


def _exchanging(cluster: Cluster) -> list[Table]:
    """One table per level: latency and bandwidth of each collective, and the largest deviation from that line."""
    tables = []
    for members, link in cluster.levels:
        if not link.measured:
            continue
        table = Table(f"{members} members", "ranks", "begins, us", "GB/s sent", "off the line", box=None)
        for kind, ranks, curve in link.measured:
            alpha, beta, worst = straightness(curve)
            table.add_row(kind, str(ranks), f"{alpha * 1e6:.0f}", f"{1e-9 / beta:.2f}", f"{worst:.0%}")
        tables.append(table)
    return tables


def straightness(curve: Curve) -> tuple[float, float, float]:
    """(alpha, beta) of the line through a collective's measurements, and its largest relative error."""
    points = curve.points[1:]
    alpha, beta = line(points)
    return alpha, beta, max(abs((alpha + beta * x) / y - 1) for x, y in points)


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"
