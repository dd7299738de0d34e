"""This machine as a cluster: from its calibration, else from a measurement of about a second.

The quick measurement is cached in a small JSON file, by processor, torch version and number of threads. In a job, let
one rank measure and send its cluster to the others.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from tutti.hardware import compute, machine
from tutti.hardware.collectives import MESSAGES
from tutti.hardware.device import Device, Link
from tutti.hardware.presets import LOOPBACK, PRESETS, RING_ONLY
from tutti.hardware.timing import times
from tutti.hardware.topology import Cluster
from tutti.whole_files import write_text

CACHE = machine.FOLDER / "devices.json"
PCIE = Link(32e9, 5.7e-6, 0.75, "assumed: PCI Express 4.0 x16")

_SHAPE = (2048, 512, 2048)  # m, k, n: a layer of a small Transformer
_COPY = 1 << 27  # bytes, more than a cache holds
_SECONDS = 0.2  # per figure


def local(n: int = 1, kind: str | None = None, cache: Path | None = CACHE) -> Cluster:
    """This machine as ``n`` devices: its GPUs, or else its cores, ``cores // n`` threads each.

    kind: "cuda" or "cpu"; by default "cuda" if there is a GPU. cache: the file for quick measurements, or None. A
    calibration in the same folder is used if `tutti calibrate` wrote it on this processor with this torch, for the same
    number of processes and threads. Without one, a GPU with a preset gets the published figures; other GPUs are
    measured, and their links are assumed. Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"a cluster needs at least 1 process, not {n}")
    kind, threads = machine.kind_of(kind), machine.threads_of(n)
    if cache is not None and (cluster := calibrated(n, threads, kind, cache.parent)):
        return cluster
    if kind == "cuda":
        return _gpus(n, cache)
    cores = machine.cores()
    key = f"{machine.processor()} | {cores} cores | torch {torch.__version__} | {threads} threads"
    figures = _cached(key, cache, lambda: measure(torch.device("cpu"), threads, cores))
    device = Device(
        "cpu",
        peak=figures["peak"],
        memory=machine.memory(torch.device("cpu")) / n,
        bandwidth=figures["bandwidth"] * min(threads / cores, 1.0),
        overhead=figures["overhead"],
        source=f"measured: {key}",
    )
    link = LOOPBACK
    if distributed.is_available() and distributed.is_gloo_available():
        figures = _cached(f"{key} | Gloo", cache, measure_gloo)
        link = Link(figures["link_bandwidth"], figures["link_latency"], source="measured: Gloo", ways=RING_ONLY)
    return Cluster(device, ((n, link),))


def calibrated(n: int, threads: int, kind: str, folder: Path = machine.FOLDER) -> Cluster | None:
    """The calibration of this machine for this many processes and threads, or None."""
    try:
        cluster = Cluster.from_json(machine.calibration(kind, n, threads, folder).read_text())
    except (OSError, ValueError):
        return None  # there is none, or one of an older release
    return cluster if cluster.device.source == machine.CALIBRATED + machine.key(kind, n, threads) else None


def measure(device: torch.device, threads: int, all_threads: int | None = None) -> dict:
    """Figures of a device: peak by dtype (FLOP/s), bandwidth (bytes/s), overhead (s).

    Matrix products run on ``threads``, the copy on ``all_threads`` (by default the same), because cores share their
    memory. float64 counts as half of float32, and float16 as float32: CPUs may have no kernel for it.
    """
    shape = _SHAPE if device.type == "cpu" else (4 * _SHAPE[0], 4 * _SHAPE[1], 4 * _SHAPE[2])
    flops = 2 * shape[0] * shape[1] * shape[2]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        peak = {dtype: flops / _best(compute.matmul(shape, dtype, device), device) for dtype in compute.DTYPES}
        operators, run = compute.small(device)
        overhead = _best(run, device) / operators
        torch.set_num_threads(all_threads or threads)
        source, target = (torch.zeros(_COPY // 4, device=device) for _ in range(2))
        bandwidth = 2 * _COPY / _best(lambda: target.copy_(source), device)
    finally:
        torch.set_num_threads(before)
    peak |= {"float64": peak["float32"] / 2, "float16": peak["float32"]}
    return {"peak": peak, "bandwidth": bandwidth, "overhead": overhead}


def measure_gloo() -> dict[str, float]:
    """The link between two processes of one machine: link_bandwidth (bytes/s sent), link_latency (s per message).

    Two ends of Gloo in this process reduce a tiny and a large tensor over the loopback.
    """
    store, ends = distributed.HashStore(), {}  # pyright: ignore[reportPrivateImportUsage]

    def join(rank: int) -> None:
        ends[rank] = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()

    def all_reduce(tensors: list[torch.Tensor]) -> None:
        for work in [ends[rank].allreduce([tensor]) for rank, tensor in enumerate(tensors)]:
            work.wait()

    cpu = torch.device("cpu")
    small, large = ([torch.zeros(size) for _ in range(2)] for size in (1, _COPY // 32))
    latency = _best(lambda: all_reduce(small), cpu) / MESSAGES["all_reduce"](2)
    seconds = _best(lambda: all_reduce(large), cpu) - 2 * latency
    return {"link_bandwidth": large[0].nbytes / seconds, "link_latency": latency}


def _gpus(n: int, cache: Path | None) -> Cluster:
    model = torch.cuda.get_device_name()
    for name, preset in PRESETS.items():
        if preset.model and re.search(preset.model, model):
            return Cluster.parse(f"{name}:{n}")
    key = f"{model} | torch {torch.__version__}"
    figures = _cached(key, cache, lambda: measure(torch.device("cuda"), torch.get_num_threads()))
    memory = machine.memory(torch.device("cuda", 0))
    source = f"measured: {key}"
    device = Device("cuda", figures["peak"], memory, figures["bandwidth"], {}, figures["overhead"], source)
    return Cluster(device, ((n, PCIE),))


def _best(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of all runs that fit into the window of one figure."""
    return min(times(run, device, _SECONDS))


def _cached(key: str, cache: Path | None, make: Callable[[], dict]) -> dict:
    if cache is None:
        return make()
    try:
        entries = json.loads(cache.read_text())
    except (OSError, ValueError):
        entries = {}  # missing or damaged: measure again
    if not isinstance(entries, dict) or key not in entries:
        entries = {**(entries if isinstance(entries, dict) else {}), key: make()}
        try:
            write_text(cache, json.dumps(entries, indent=2))
        except OSError as error:
            warnings.warn(f"could not keep the measurement of this machine: {error}", stacklevel=3)
    return entries[key]
