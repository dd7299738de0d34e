"""The cluster that this machine is, for a number of processes, from a measurement of a second or so.

The measurement is kept in a small JSON file, by processor, torch version and number of threads. Ranks of one
job should not each measure: let one do it and hand the others its cluster.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from tutti.cluster.collectives import MESSAGES
from tutti.cluster.device import Device, Link
from tutti.cluster.presets import LOOPBACK, PRESETS
from tutti.cluster.topology import Cluster

CACHE = Path.home() / ".cache" / "tutti" / "devices.json"
PCIE = Link(32e9, 5.7e-6, 0.75, "assumed: PCI Express 4.0 x16")

_SHAPE = (2048, 512, 2048)  # m, k, n: a layer of a small Transformer
_COPY = 1 << 27  # bytes, more than a cache holds
_SECONDS = 0.2  # for each figure


def local(n: int = 1, kind: str | None = None, cache: Path | None = CACHE) -> Cluster:
    """This machine as ``n`` devices: its GPUs, or else its cores, ``cores // n`` threads each.

    kind: "cuda" or "cpu"; by default "cuda" where there is one. cache: the file to keep figures in, or None.
    A GPU with a preset gets the published figures, another one is measured and its links are assumed.
    """
    if n < 1:
        raise ValueError(f"a cluster of {n} processes; at least 1 is needed")
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        return _gpus(n, cache)
    if kind != "cpu":
        raise ValueError(f"no kind of device {kind!r}; known are cpu and cuda")
    cores = _cores()
    threads = max(1, cores // n)
    key = f"{_processor()} | {cores} cores | torch {torch.__version__} | {threads} threads"
    figures = _cached(key, cache, lambda: measure(torch.device("cpu"), threads, cores))
    device = Device(
        "cpu",
        peak=figures["peak"],
        memory=_memory() / n,
        bandwidth=figures["bandwidth"] * min(threads / cores, 1.0),
        overhead=figures["overhead"],
        source=f"measured: {key}",
    )
    link = LOOPBACK
    if distributed.is_available() and distributed.is_gloo_available():
        figures = _cached(f"{key} | Gloo", cache, measure_gloo)
        link = Link(figures["link_bandwidth"], figures["link_latency"], source="measured: Gloo")
    return Cluster(device, ((n, link),))


def measure(device: torch.device, threads: int, all_threads: int | None = None) -> dict:
    """Figures of a device: peak by dtype (FLOP/s), bandwidth (bytes/s), overhead (s).

    Matrix products run on ``threads``, the copy on ``all_threads`` (by default the same), because cores share
    their memory. float64 is taken as half of float32, and float16 as float32: CPUs may have no kernel for it.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        peak = {name: _matmul_rate(device, getattr(torch, name)) for name in ("float32", "bfloat16")}
        small = torch.zeros(8, device=device)
        overhead = _best(lambda: [small.add_(1) for _ in range(100)], device) / 100
        torch.set_num_threads(all_threads or threads)
        source, target = (torch.zeros(_COPY // 4, device=device) for _ in range(2))
        bandwidth = 2 * _COPY / _best(lambda: target.copy_(source), device)
    finally:
        torch.set_num_threads(before)
    peak |= {"float64": peak["float32"] / 2, "float16": peak["float32"]}
    return {"peak": peak, "bandwidth": bandwidth, "overhead": overhead}


def measure_gloo() -> dict[str, float]:
    """What joins two processes of one machine: link_bandwidth (bytes/s sent), link_latency (s a message).

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
    memory = torch.cuda.get_device_properties(0).total_memory
    source = f"measured: {key}"
    device = Device("cuda", figures["peak"], memory, figures["bandwidth"], {}, figures["overhead"], source)
    return Cluster(device, ((n, PCIE),))


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    m, k, n = _SHAPE if device.type == "cpu" else tuple(4 * size for size in _SHAPE)
    a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    return 2 * m * k * n / _best(lambda: a @ b, device)


def _best(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of as many runs as fit into the time for one figure."""

    def once() -> float:
        return _seconds(lambda: (run(), torch.cuda.synchronize(device) if device.type == "cuda" else None))

    once()  # loads libraries and starts threads
    best = spent = once()
    while spent < _SECONDS:
        last = once()
        best, spent = min(best, last), spent + last
    return best


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cached(key: str, cache: Path | None, make: Callable[[], dict]) -> dict:
    if cache is None:
        return make()
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        known = {}  # none yet, or one that broke: measured again
    if not isinstance(known, dict) or key not in known:
        known = {**(known if isinstance(known, dict) else {}), key: make()}
        try:
            _write(cache, json.dumps(known, indent=2))
        except OSError as error:
            warnings.warn(f"could not keep the measurement of this machine: {error}", stacklevel=3)
    return known[key]


def _write(path: Path, text: str) -> None:
    """Whole or not at all: other processes may read meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(name).replace(path)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.processor() or platform.machine()])[0]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    """Bytes of main memory that this process may use, the limit of its container included."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
