"""Measure the collectives of a process group over bytes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from tutti.compat import all_gather_single, reduce_scatter_single
from tutti.hardware.collectives import MESSAGES
from tutti.hardware.compute import sweep
from tutti.hardware.timing import Clock, once
from tutti.progress import Say


def sent(kind: str, count: int, k: int) -> float:
    """Bytes that each of k ranks sends for a buffer of `count` bytes in total (of an all-gather: the result)."""
    return {"all_reduce": 2 * (k - 1) / k, "ppermute": 1.0}.get(kind, (k - 1) / k) * count


def collective(kind: str, count: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """A run of one collective over a buffer of `count` bytes."""
    k, me = group.size(), group.rank()
    whole = torch.ones(max(1, count // (4 * k)) * k, device=device)
    part, other = whole[: len(whole) // k].clone(), torch.empty_like(whole)

    def ppermute() -> None:
        ranks = dist.get_process_group_ranks(group)
        ops = [dist.P2POp(dist.isend, whole, ranks[(me + 1) % k]), dist.P2POp(dist.irecv, other, ranks[me - 1])]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, group),
        "all_gather": lambda: all_gather_single(whole, part, group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, dist.ReduceOp.SUM, group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "ppermute": ppermute,
    }[kind]


def seconds(
    run: Callable[[], object],
    group: dist.ProcessGroup,
    device: torch.device,
    window: float,
    clock: Clock = perf_counter,
    sharing: float = 1.0,
) -> list[float]:
    """The seconds that each run adds to ranks that compute in between; as many runs as take about a window.

    As in a plan, the data sent is in no cache, waiting ranks sleep, and ranks do not arrive at the same moment. clock:
    for the computation, which takes `sharing` times as long as the clock says. Means over ranks.
    """
    before = sweep(device)
    run()  # connects, allocates

    def added() -> tuple[float, float]:
        """Seconds of the computation, and with the run."""
        start = perf_counter()
        computed = once(before, device, clock)
        once(run, device)
        took = perf_counter() - start
        return took - sharing * computed, took

    added()
    about = torch.tensor(added()[1], device=device)
    dist.all_reduce(about, dist.ReduceOp.MAX, group)
    runs = max(1, min(MOST, int(window / about.item())))
    durations = torch.tensor([added()[0] for _ in range(runs)], dtype=torch.float64, device=device)
    dist.all_reduce(durations, dist.ReduceOp.SUM, group)
    return (durations / group.size()).clamp(min=LEAST).tolist()


LEAST = 1e-6  # seconds: lower bound of a measurement
MOST = 100  # runs


def points(
    group: dist.ProcessGroup,
    device: torch.device,
    sizes: tuple[int, ...],
    window: float,
    rounds: int,
    advance: Say,
    clock: Clock = perf_counter,
    sharing: float = 1.0,
) -> dict[str, list[tuple[float, float]]]:
    """(bytes sent, seconds) of every collective: the lower quartile over rounds at different times.

    Other programs on the machine only add time.
    """
    durations: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for kind in MESSAGES:
            for count in sizes:
                advance(kind)
                run = collective(kind, count, group, device)
                durations.setdefault((kind, count), []).extend(
                    seconds(run, group, device, window / rounds, clock, sharing)
                )
    k = group.size()
    return {kind: [(sent(kind, c, k), _lower_quartile(durations[kind, c])) for c in sizes] for kind in MESSAGES}


def _lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]
