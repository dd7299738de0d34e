"""What collectives of a process group take, measured over bytes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from tutti.cluster.collectives import MESSAGES
from tutti.compat import all_gather_single, reduce_scatter_single

BATCHES = 8  # of runs, back to back, as ranks of a plan go from one collective into the next


def sent(kind: str, count: int, k: int) -> float:
    """Bytes that each of k ranks sends when the whole buffer has `count` (of an all-gather: the result)."""
    return {"all_reduce": 2 * (k - 1) / k, "shift": 1.0}.get(kind, (k - 1) / k) * count


def collective(kind: str, count: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """A run of one collective over a buffer of `count` bytes."""
    k, me = group.size(), group.rank()
    whole = torch.ones(max(1, count // (4 * k)) * k, device=device)
    part, other = whole[: len(whole) // k].clone(), torch.empty_like(whole)

    def shift() -> None:
        ranks = dist.get_process_group_ranks(group)
        ops = [dist.P2POp(dist.isend, whole, ranks[(me + 1) % k]), dist.P2POp(dist.irecv, other, ranks[me - 1])]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, group),
        "all_gather": lambda: all_gather_single(whole, part, group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, dist.ReduceOp.SUM, group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "shift": shift,
    }[kind]


def seconds(run: Callable[[], object], group: dist.ProcessGroup, device: torch.device, window: float) -> list[float]:
    """Of a run, by batches, the slowest rank's. All ranks make as many runs, about a window's."""

    def timed(runs: int) -> float:
        start = perf_counter()
        for _ in range(runs):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (perf_counter() - start) / runs

    def slowest(values: list[float]) -> list[float]:
        found = torch.tensor(values, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return found.tolist()

    timed(1)  # connects, allocates
    (about,) = slowest([timed(1)])
    runs = max(1, min(100, int(window / BATCHES / max(about, 1e-6))))
    batches = max(1, min(BATCHES, int(window / max(about, 1e-6))))
    return slowest([timed(runs) for _ in range(batches)])


def points(
    group: dist.ProcessGroup,
    device: torch.device,
    sizes: tuple[int, ...],
    window: float,
    rounds: int,
    advance: Callable[[str], None],
) -> dict[str, list[tuple[float, float]]]:
    """(bytes sent, seconds) of every collective: the lower quartile over rounds that are some time apart.

    Other programs of the machine only ever add.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for kind in MESSAGES:
            for count in sizes:
                advance(kind)
                run = collective(kind, count, group, device)
                found.setdefault((kind, count), []).extend(seconds(run, group, device, window / rounds))
    k = group.size()
    return {kind: [(sent(kind, c, k), _lower_quartile(found[kind, c])) for c in sizes] for kind in MESSAGES}


def _lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]
