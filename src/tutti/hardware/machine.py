"""This machine: its processor, cores and memory, and the files of its measurements."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

FOLDER = Path.home() / ".cache" / "tutti"
CALIBRATED = "calibrated: "  # prefix of a calibrated device's source, before the key of its machine


def kind_of(kind: str | None) -> str:
    """The kind of device: as given, else "cuda" if there is a GPU, else "cpu"."""
    if kind not in (None, "cpu", "cuda"):
        raise ValueError(f"unknown kind of device {kind!r}; expected cpu or cuda")
    return kind or ("cuda" if torch.cuda.is_available() else "cpu")


def threads_of(processes: int, threads: int | None = None) -> int:
    """Threads per process: as given, else the cores divided by the processes."""
    if threads is not None and threads < 1:
        raise ValueError(f"a process needs at least 1 thread, not {threads}")
    return threads or max(1, cores() // processes)


def identity() -> str:
    """An identity shared by exactly the processes of one boot of one machine, which share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def devices(kind: str) -> int:
    """The number of GPUs, or of cores."""
    return torch.cuda.device_count() if kind == "cuda" else cores()


def key(kind: str, processes: int, threads: int) -> str:
    """What a calibration is valid for."""
    name = torch.cuda.get_device_name() if kind == "cuda" else f"{processor()} | {cores()} cores"
    return f"{name} | torch {torch.__version__} | {processes} processes | {threads} threads"


def calibration(kind: str, processes: int, threads: int, folder: Path = FOLDER) -> Path:
    """The file of a calibration. Another machine or torch may have written it: its key says which."""
    return folder / f"{kind}-{processes}x{threads}.json"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.processor() or platform.machine()])[0]


@cache
def _allowed() -> tuple[int, ...]:
    """The cores that this process was allowed at its start."""
    return tuple(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def cores() -> int:
    return len(_allowed())


def keep_to_own_cores(place: int, processes: int, threads: int) -> bool:
    """Pin this process, one of several on the machine, to its part of the cores. Returns False if that is not possible.

    Otherwise the scheduler moves threads that wake each other, such as those of collectives, to one core, where one
    process waits while the other computes: on two cores, steps with many collectives took 1.4 to 2 times as long. Call
    it before threads start. Does nothing if one process has all cores, or more threads than its part.
    """
    own = cores_of(place, processes, _allowed())
    if processes == 1 or threads > len(own) or not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, own)
    return True


def cores_of(place: int, processes: int, all_cores: Sequence[int]) -> set[int]:
    """Adjacent cores, equally many for each process. With more processes than cores, neighbours share one.

    >>> [sorted(cores_of(i, 2, range(5))) for i in range(2)], [sorted(cores_of(i, 4, (0, 3))) for i in range(4)]
    ([[0, 1], [2, 3]], [[0], [0], [3], [3]])
    """
    each = max(1, len(all_cores) // processes)
    first = place * each if processes <= len(all_cores) else place * len(all_cores) // processes
    return set(all_cores[first : first + each])


def memory(device: torch.device) -> int:
    """Bytes of a GPU, or of main memory available to this process, within the limit of its container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


@cache
def sources() -> str:
    """A hash of this package's source, for caches of what it computes: other rules or prices may give other results."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
