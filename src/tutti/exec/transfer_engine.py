"""Carriers: who carries out the transfers between tiers of a Program (`tutti.lower.transfers`), and what the host
computes of it.

All that a process carries goes in the order in which it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tutti.exec.offload_store import OffloadStore
from tutti.exec.stream import Stream
from tutti.ir.step_graph import Spec
from tutti.plan.tier import HOST


@cache
def _copying() -> ThreadPoolExecutor:
    """The thread that copies for this process: memory is no faster to two."""
    return ThreadPoolExecutor(1, "tutti-carrier")


@cache
def _computing() -> ThreadPoolExecutor:
    """The thread that computes what the host does for another device."""
    return ThreadPoolExecutor(1, "tutti-host")


def engine_for(device: torch.device, offload_store: OffloadStore) -> TransferEngine:
    """The one of this kind of device."""
    return Queued(offload_store, Stream(device)) if device.type == "cuda" else Threaded(offload_store)


class _Thread:
    """One that does what it is asked for, in order. What goes wrong there is raised when it is settled."""

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
    """Of a CPU. What is fetched or put aside is copied in a thread, while the device computes; all else at once."""

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
        kept = self.offload_store.take(Spec.of(x), tier, x.stride())
        self.thread.ask(np.copyto, _raw(kept), _raw(x))
        return kept

    def lend(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def bring(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def store(self, home: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return home.copy_(x)

    def compute(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def settle(self) -> None:
        """Wait until all that is under way is there."""
        self.thread.settle()


class Queued:
    """Of a device that works off a queue. Copies between it and the shelf go in a queue of their own, each when all is
    done that the device was given before it. The host computes in a thread, when all copies are done that were asked
    for before; what it makes is a `Future` until somebody has to have it.
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
        kept = self.offload_store.take(Spec.of(x), tier, x.stride())
        self.stream.copy(kept, x)
        return kept

    def lend(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.offload_store.take(Spec.of(x), HOST)
        self.stream.copy(kept, x.contiguous())
        return kept

    def bring(self, x: Any) -> torch.Tensor:
        self.thread.settle()  # what writes into it may have been asked for after what made it
        return self.arrived(self.fetch(_there(x)))

    def store(self, home: torch.Tensor, x: Any) -> torch.Tensor:
        if self.offload_store.holds(home) and (isinstance(x, Future) or self.offload_store.holds(x)):
            self.compute(home.copy_, x)
        else:  # when the host has made it, and is done with what was there; the device has read that then
            given = self.stream.now()
            self.compute(lambda value: self.stream.copy(home, value, after=given), x)
        return home

    def compute(self, function: Callable, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result of a function of tensors on the host, some of which may still be under way."""
        copied = self.stream.copied()

        def run() -> Any:
            copied.synchronize()
            with torch.no_grad():
                return function(*pytree.tree_map(_there, args), **pytree.tree_map(_there, kwargs))

        return self.thread.ask(run)

    def settle(self) -> None:
        """Wait until all that is under way is there."""
        self.thread.settle()
        self.stream.copied().synchronize()


TransferEngine = Threaded | Queued


def _there(x: Any) -> Any:
    return x.result() if isinstance(x, Future) else x


def _raw(x: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor without holes."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()


def _without_holes(x: torch.Tensor) -> torch.Tensor:
    """The tensor as it lies, or a copy where there are holes in it."""
    dense = torch.empty_like(x, device="meta").stride()
    return x if x.stride() == dense else torch.empty_like(x).copy_(x)
