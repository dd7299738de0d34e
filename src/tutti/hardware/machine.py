"""This machine: its processor, cores and memory, and where what was measured of it is kept."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

FOLDER = Path.home() / ".cache" / "tutti"
CALIBRATED = "calibrated: "  # begins the source of a calibrated device; the key of its machine follows


def kind_of(kind: str | None) -> str:
    """ "cuda" or "cpu": as asked, else "cuda" where there is one."""
    if kind not in (None, "cpu", "cuda"):
        raise ValueError(f"no kind of device {kind!r}; known are cpu and cuda")
    return kind or ("cuda" if torch.cuda.is_available() else "cpu")


def threads_of(processes: int, threads: int | None = None) -> int:
    """Threads of each process: as asked, else the cores divided."""
    if threads is not None and threads < 1:
        raise ValueError(f"a process of {threads} threads; at least 1 is needed")
    return threads or max(1, cores() // processes)


def identity() -> str:
    """The same for all processes whose clocks are one, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def devices(kind: str) -> int:
    """GPUs, or cores."""
    return torch.cuda.device_count() if kind == "cuda" else cores()


def key(kind: str, processes: int, threads: int) -> str:
    """What a calibration holds for."""
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
    """The cores that this process was given when it began."""
    return tuple(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def cores() -> int:
    return len(_allowed())


def keep_to_own_cores(place: int, processes: int, threads: int) -> bool:
    """Keep this process, one of several that share the machine, to its part of the cores; False where that cannot be.

    Else the scheduler gathers threads that wake each other, as those of collectives do, on one core, where one process
    waits until the other has computed: on two cores steps with many collectives took 1.4 to 2 times as long. To be
    called before they start. Nothing is done where one process has all cores, or has more threads than its part.
    """
    own = cores_of(place, processes, _allowed())
    if processes == 1 or threads > len(own) or not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, own)
    return True


def cores_of(place: int, processes: int, all_cores: Sequence[int]) -> set[int]:
    """Neighbouring cores, as many for each; with more processes than cores, neighbours share one.

    >>> [sorted(cores_of(i, 2, range(5))) for i in range(2)], [sorted(cores_of(i, 4, (0, 3))) for i in range(4)]
    ([[0, 1], [2, 3]], [[0], [0], [3], [3]])
    """
    each = max(1, len(all_cores) // processes)
    first = place * each if processes <= len(all_cores) else place * len(all_cores) // processes
    return set(all_cores[first : first + each])


def memory(device: torch.device) -> int:
    """Bytes of a GPU, or of the main memory that this process may use, the limit of its container included."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def write(path: Path, text: str) -> None:
    """Whole or not at all: other processes may read meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(name).replace(path)
