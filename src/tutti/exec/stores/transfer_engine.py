"""Transfer engines: execute a Program's transfers between tiers (`tutti.lower.memory.transfers`) and its host
computations.

The transfers of a process run in the order in which they were requested.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tutti.exec.runtimes.stream import Stream
from tutti.exec.stores.offload_store import OffloadStore
from tutti.ir.spec import Spec
from tutti.plan.tier import HOST


@cache
def _copying() -> ThreadPoolExecutor:
    """The thread that copies for this process. A second one would not be faster."""
    return ThreadPoolExecutor(1, "tutti-carrier")


@cache
def _computing() -> ThreadPoolExecutor:
    """The thread that runs the host's computations for another device."""
    return ThreadPoolExecutor(1, "tutti-host")


def engine_for(device: torch.device, offload_store: OffloadStore) -> TransferEngine:
    """The engine for a kind of device."""
    return Queued(offload_store, Stream(device)) if device.type == "cuda" else Threaded(offload_store)


class _Thread:
    """Runs functions in a thread, in order. Their errors are raised by `settle`."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool
        self.failed: list[BaseException] = []

    def ask(self, function: Callable, *args: Any) -> Future[Any]:
        asked = self.pool.submit(function, *args)
        asked.add_done_callback(lambda done: self.failed.extend(e for e in [done.exception()] if e))
        return asked

    def settle(self) -> None:
        self.pool.submit(int).result()
        if self.failed:
            error, self.failed = self.failed[0], []
            raise error


class Threaded:
    """The engine of a CPU. A thread copies fetched and offloaded tensors during computation; the rest is immediate."""

    def __init__(self, offload_store: OffloadStore):
        self.offload_store, self.thread = offload_store, _Thread(_copying())

    def fetch(self, home: torch.Tensor) -> Any:
        x = torch.empty_like(home)
        x.carried = self.thread.ask(np.copyto, _raw(x), _raw(home))  # pyright: ignore
        return x

    def arrived(self, x: Any) -> torch.Tensor:
        x.carried.result()
        del x.carried
        return x

    def put(self, x: torch.Tensor, tier: str) -> torch.Tensor:
        x = _without_holes(x)
        stored = self.offload_store.take(Spec.of(x), tier, x.stride())
        self.thread.ask(np.copyto, _raw(stored), _raw(x))
        return stored

    def lend(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def bring(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def store(self, home: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return home.copy_(x)

    def compute(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def settle(self) -> None:
        """Wait for all transfers and host computations."""
        self.thread.settle()


class Queued:
    """The engine of a device with queues. Copies run on a queue of their own, each after the work that the device was
    given before it. The host computes in a thread, after the copies that were requested before; its result is a
    `Future` until it is needed.
    """

    def __init__(self, offload_store: OffloadStore, stream: Stream):
        self.offload_store, self.stream, self.thread = offload_store, stream, _Thread(_computing())

    def fetch(self, home: torch.Tensor) -> Any:
        x: Any = self.stream.empty_like(home)
        x.carried = self.stream.copy(x, home)
        return x

    def arrived(self, x: Any) -> torch.Tensor:
        self.stream.wait(x.carried)
        del x.carried
        return x

    def put(self, x: torch.Tensor, tier: str) -> torch.Tensor:
        x = _without_holes(x)
        stored = self.offload_store.take(Spec.of(x), tier, x.stride())
        self.stream.copy(stored, x)
        return stored

    def lend(self, x: torch.Tensor) -> torch.Tensor:
        lent = self.offload_store.take(Spec.of(x), HOST)
        self.stream.copy(lent, x.contiguous())
        return lent

    def bring(self, x: Any) -> torch.Tensor:
        self.thread.settle()  # a write into it may have been requested after its creation
        return self.arrived(self.fetch(_there(x)))

    def store(self, home: torch.Tensor, x: Any) -> torch.Tensor:
        if self.offload_store.holds(home) and (isinstance(x, Future) or self.offload_store.holds(x)):
            self.compute(home.copy_, x)
        else:  # after the host has computed it; the device has read the old value by then
            ready = self.stream.now()
            self.compute(lambda value: self.stream.copy(home, value, after=ready), x)
        return home

    def compute(self, function: Callable, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function of host tensors, some of which may not be complete yet."""
        copied = self.stream.copied()

        def run() -> Any:
            copied.synchronize()
            with torch.no_grad():
                return function(*pytree.tree_map(_there, args), **pytree.tree_map(_there, kwargs))

        return self.thread.ask(run)

    def settle(self) -> None:
        """Wait for all transfers and host computations."""
        self.thread.settle()
        self.stream.copied().synchronize()


TransferEngine = Threaded | Queued


def _there(x: Any) -> Any:
    return x.result() if isinstance(x, Future) else x


def _raw(x: torch.Tensor) -> np.ndarray:
    """The bytes of a dense tensor."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()


def _without_holes(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory is dense, else a dense copy."""
    dense = torch.empty_like(x, device="meta").stride()
    return x if x.stride() == dense else torch.empty_like(x).copy_(x)
