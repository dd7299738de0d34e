"""The ranks of a run with several learners, and the one operator by which they meet.

Ranks are threads of a process, and processes of a `torch.distributed` job with equally many threads. A rank sees only
`mean_of_ranks`. Sums are in the order of ranks, wherever they run: with any number of processes all bits are equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_here: ContextVar[tuple[Ranks, int] | None] = ContextVar("ranks", default=None)


def processes() -> int:
    """Number of processes of this job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def process() -> int:
    """The number of this process in its job."""
    return dist.get_rank() if dist.is_initialized() else 0


def own_ranks(count: int) -> range:
    """The ranks, out of `count`, that run in this process. Raises ValueError if they cannot be shared out equally."""
    if count % processes():
        raise ValueError(f"{count} ranks cannot be shared out equally among {processes()} processes")
    each = count // processes()
    return range(process() * each, (process() + 1) * each)


class Ranks:
    """`count` ranks, those of this process as threads."""

    def __init__(self, count: int):
        self.count, self.own = count, own_ranks(count)
        self.barrier = threading.Barrier(len(self.own))
        self.values: list[Any] = [None] * len(self.own)
        self.average: Tensor | None = None

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """`work(rank)` for each rank of this process, at the same time. Returns the results by rank.

        If one raises, the others end, too, and its error is raised here.
        """
        results: list[Any] = [None] * len(self.own)
        errors: list[BaseException] = []

        def thread(i: int) -> None:
            _here.set((self, i))
            try:
                results[i] = work(self.own[i])
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=copy_context().run, args=(thread, i)) for i in range(len(self.own))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]
        return results

    def mean(self, i: int, x: Tensor) -> Tensor:
        """Average `x` over all ranks. i: index of the calling rank within this process."""
        self.values[i] = x
        if self.barrier.wait() == 0:
            mine = torch.stack([torch.as_tensor(g) for g in self.values])
            everywhere = [mine]
            if processes() > 1:
                everywhere = [torch.empty_like(mine) for _ in range(processes())]
                dist.all_gather(everywhere, mine)
            total = torch.zeros_like(x)
            for part in torch.cat(everywhere).unbind(0):
                total = total + part
            self.average = total / self.count
        self.barrier.wait()
        assert self.average is not None
        return self.average.clone()


def mean_of_ranks(x: Tensor) -> Tensor:
    """The mean of a tensor over all ranks; the tensor itself where there is one."""
    here = _here.get()
    return x if here is None or here[0].count == 1 else torch.ops.tutti.mean_of_ranks(x)


def _mean(x: Tensor) -> Tensor:
    here = _here.get()
    assert here is not None, "a program of several ranks runs outside of them"
    return here[0].mean(here[1], x)


_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("mean_of_ranks(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("mean_of_ranks", _mean, "CompositeExplicitAutograd")
torch.library.register_fake("tutti::mean_of_ranks", torch.empty_like, lib=_library)
