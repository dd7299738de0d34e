"""Measure the peak memory of a training step, in tensors of one rank, to compare with the prediction."""

import gc
import json
import resource
import tempfile
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_MARK = "tutti.peak"


class PeakMemory:
    """Calls a function, and reports the peak bytes of the fourth call to `report`.

    Without `report` it only calls.

    On a GPU the allocator is queried. On a CPU the peak is the bytes of all tensors at the start of the call, plus the
    maximum that the profiler saw allocated and not freed since. The third call is profiled too, because the profiler
    reports frees only for allocations it saw. Memory outside tensors (Python, libraries, compiled code) does not count.
    """

    def __init__(self, report: Callable[[int], None] | None):
        self._report, self._calls = report, 0

    def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        self._calls += 1
        if self._report is not None and self._calls == 4:
            measure = _on_gpu if torch.cuda.is_available() else self._on_cpu
            result, peak = measure(function, *args)
            self._report(peak)
            return result
        if self._report is not None and self._calls == 3 and not torch.cuda.is_available():
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()
        return function(*args)

    def _on_cpu(self, function: Callable[[*Ts], T], *args: *Ts) -> tuple[T, int]:
        before = live_bytes()
        with record_function(_MARK):
            result = function(*args)
        self._profile.stop()
        peak = before + _most_allocated(self._profile)
        del self._profile
        return result, peak


def _on_gpu(function: Callable[[*Ts], T], *args: *Ts) -> tuple[T, int]:
    torch.cuda.reset_peak_memory_stats()
    result = function(*args)
    return result, torch.cuda.max_memory_allocated()


def peak_bytes() -> int:
    """Return the peak bytes of this process so far: tensors on its GPU, or, without a GPU, its physical memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def live_bytes() -> int:
    """Bytes of all CPU tensors of this process. Shared storage counts once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _most_allocated(profiled: profile) -> int:
    """Maximum of allocations minus frees within the marked call."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    begin = next(e["ts"] for e in events if e.get("name") == _MARK)
    now = most = 0
    for e in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        if e["ts"] >= begin and e["args"]["Device Type"] == 0:
            now += e["args"]["Bytes"]
            most = max(most, now)
    return most
