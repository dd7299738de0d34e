"""Peak memory of a training step, in tensors of one rank, measured to hold a prediction against."""

import gc
import json
import resource
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "tutti.peak"


class PeakMemory:
    """Calls a function, measures the fourth call and hands the bytes to `report`; some tensors do not count.

    Without a `report` it only calls.

    On a GPU the allocator knows. On a CPU it is what all tensors held when the call began, plus the most
    that the profiler saw allocated and not yet freed since then. The third call is watched too, because the
    profiler knows only of frees of what it saw allocated. What is no tensor (Python, libraries, compiled
    code) does not count.
    """

    def __init__(self, report: Callable[[int], None] | None, except_for: Iterable[torch.Tensor] = ()):
        self._report, self._except, self._calls = report, list(except_for), 0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self._calls += 1
        if self._report is not None and self._calls == 4:
            measure = _on_gpu if torch.cuda.is_available() else self._on_cpu
            result, peak = measure(self._except, function, *args)
            self._report(peak)
            return result
        if self._report is not None and self._calls == 3 and not torch.cuda.is_available():
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()
        return function(*args)

    def _on_cpu(self, except_for: list[torch.Tensor], function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
        before = live_bytes(except_for)
        with record_function(_MARK):
            result = function(*args)
        self._profile.stop()
        peak = before + _most_allocated(self._profile)
        del self._profile
        return result, peak


def _on_gpu(except_for: list[torch.Tensor], function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    torch.cuda.reset_peak_memory_stats()
    result = function(*args)
    return result, torch.cuda.max_memory_allocated() - sum(t.nbytes for t in except_for if t.is_cuda)


def peak_bytes() -> int:
    """The most that this process has held so far: of tensors on its GPU, or without one of physical memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def live_bytes(except_for: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of all CPU tensors of this process but some, storage shared by several counted once."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in except_for}
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in storages.items() if place not in left_out)


def _most_allocated(profiled: profile) -> int:
    """Highest sum of allocations less frees inside the marked call, from when it began."""
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
