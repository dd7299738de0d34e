"""Steps recorded as CUDA graphs, which a GPU replays without work of the host between its kernels.

A recorded step reads its arguments from memory that stays in place. One copy brings all of them there: the host writes
them into a pinned buffer, which is copied to a buffer on the device, of which the arguments are views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ALIGNMENT = 256  # bytes, of each argument


class Recorder(Protocol):
    """Records what a function does on a device."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call a function, record another call, and return what replays it on the current stream."""
        ...

    def buffers(self, size: int) -> tuple[Tensor, Tensor]:
        """Memory on the host and on the device: uint8 (size)."""
        ...

    def send(self, host: Tensor, device: Tensor) -> Callable[[], None]:
        """Copy to the device. Returns what waits until the copy has ended."""
        ...


class CudaGraphs:
    """Records CUDA graphs. They share a pool of memory, so what one computes must be read before another is replayed.

    device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            run()  # kernels are compiled, and libraries take their workspaces
            self.stream.synchronize()
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        return graph.replay

    def buffers(self, size: int) -> tuple[Tensor, Tensor]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return host, torch.empty(size, dtype=torch.uint8, device=self.device)

    def send(self, host: Tensor, device: Tensor) -> Callable[[], None]:
        device.copy_(host, non_blocking=True)
        return torch.cuda.current_stream(self.device).record_event().synchronize


class Recorded:
    """A step for arguments of fixed shapes, recorded.

    step: a function of tensors on the device that returns rows (rows, width). arguments: arguments of a first call, a
    pytree of CPU tensors, for which the step is run twice at most: it must do the same each time. results: memory on
    the device for the rows (at least as many, width), which other steps may share.
    """

    def __init__(self, step: Callable[..., Tensor], arguments: tuple[object, ...], recorder: Recorder, results: Tensor):
        leaves, tree = pytree.tree_flatten(arguments)
        sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in leaves]
        self.recorder = recorder
        self.host, self.device = recorder.buffers(sum(sizes))
        self.places, inputs = _views(self.host, leaves, sizes), _views(self.device, leaves, sizes)
        self.wait: Callable[[], None] = lambda: None
        own_arguments = pytree.tree_unflatten(inputs, tree)
        self._send(leaves)
        rows = 0

        def run() -> None:
            nonlocal rows
            logits = step(*own_arguments)
            rows = len(logits)
            results[:rows].copy_(logits)

        self.replay = recorder.record(run)
        self.results = results[:rows]

    def _send(self, leaves: Sequence[Tensor]) -> None:
        self.wait()
        for place, x in zip(self.places, leaves, strict=True):
            place.copy_(x)
        self.wait = self.recorder.send(self.host, self.device)

    def __call__(self, *arguments: object) -> Tensor:
        """Run the step. The result is valid until another step that shares its memory runs."""
        self._send(pytree.tree_leaves(arguments))
        self.replay()
        return self.results


def _views(buffer: Tensor, leaves: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Parts of a buffer with the shapes and dtypes of tensors."""
    parts = buffer.split(list(sizes))
    return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, leaves, strict=True)]
