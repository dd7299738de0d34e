"""Carriers: who carries out the transfers between tiers of a Program (`tutti.lower.transfers`).

A copy that is fetched is under way while the device computes, in a thread. All that a process carries goes in the order
in which it was asked for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from tutti.graph.step_graph import Spec
from tutti.run.shelf import Shelf


@cache
def _thread() -> ThreadPoolExecutor:
    """The one that copies for this process: memory is no faster to two."""
    return ThreadPoolExecutor(1, "tutti-carrier")


def _raw(x: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor without holes."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()


class Threaded:
    """Of a CPU. What is fetched or put aside is copied in a thread, all else at once."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf

    def fetch(self, home: torch.Tensor) -> Any:
        x = torch.empty_like(home)
        x.carried = _thread().submit(np.copyto, _raw(x), _raw(home))  # pyright: ignore
        return x

    def arrived(self, x: Any) -> torch.Tensor:
        x.carried.result()
        del x.carried
        return x

    def put(self, x: torch.Tensor, tier: str) -> torch.Tensor:
        dense = torch.empty_like(x, device="meta").stride()  # as it lies, if there are no holes in it
        kept = self.shelf.take(Spec.of(x), tier, dense)
        x = x if x.stride() == dense else torch.empty_like(x).copy_(x)
        _thread().submit(np.copyto, _raw(kept), _raw(x)).add_done_callback(_check)
        return kept

    def lend(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def bring(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def store(self, home: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return home.copy_(x)

    def settle(self) -> None:
        """Wait until all that is under way is there."""
        _thread().submit(int).result()


Carrier = Threaded


def _check(done) -> None:
    done.result()
