"""Compression by the processes of a job, which share the calibration data and the layers to be quantized.

Statistics of inputs are summed over all processes, so all of them make the same model; the first one writes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tutti.compress.statistics import Statistics

T = TypeVar("T")


PATIENCE = timedelta(hours=12)  # a process may wait for another's largest layers


def join() -> None:
    """Meet the other processes of the job, if this process was started as one of several (torchrun, `tutti run`)."""
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=PATIENCE)


def processes() -> int:
    """Processes of this job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def process() -> int:
    """The number of this process in its job. The first one, 0, writes files."""
    return dist.get_rank() if dist.is_initialized() else 0


def own_share(batches: list[T]) -> list[T]:
    """The batches that this process runs. Raises ValueError if there are fewer than processes."""
    if len(batches) < processes():
        raise ValueError(f"{len(batches)} batches of calibration data for {processes()} processes: give one for each")
    return batches[process() :: processes()]


def add_up(statistics: Mapping[str, Statistics]) -> None:
    """Sum statistics over all processes, in place. Each must have those of the same layers."""
    if processes() == 1:
        return
    paths = sorted(statistics)
    if any(x != paths for x in gathered(paths)):
        raise ValueError("processes have statistics of different layers: their data reaches different parts of a block")
    for each in {id(statistics[path]): statistics[path] for path in paths}.values():
        for total in (each.gram, each.total):
            dist.all_reduce(total)
        dist.all_reduce(each.most, dist.ReduceOp.MAX)
        each.count = round(added(each.count))


def added(number: float) -> float:
    """The sum of a number over all processes."""
    return sum(gathered(number))


def agreed(value: bool) -> bool:
    """Whether a value is true in all processes."""
    return all(gathered(value))


def gathered(value: T) -> list[T]:
    """The values of all processes."""
    if processes() == 1:
        return [value]
    values: list[Any] = [None] * processes()
    dist.all_gather_object(values, value)
    return values


def by_first(work: Callable[[], T]) -> T:
    """What the first process makes; the others wait for it. Its ValueError or OSError is raised in all of them."""
    if processes() == 1:
        return work()
    box: list[Any] = [None]
    if process() == 0:
        try:
            box = [work()]
        except (ValueError, OSError) as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def each(names: Sequence[str], work: Callable[[str], T], cost: Callable[[str], float]) -> Iterator[tuple[str, T]]:
    """Yield (name, work(name)) for each name. Processes share the work, the most costly first.

    With one process, work is done when it is asked for; with several, all results are held.
    """
    if processes() == 1:
        yield from ((name, work(name)) for name in names)
        return
    loads, own = [0.0] * processes(), []
    for name in sorted(names, key=cost, reverse=True):
        least = loads.index(min(loads))
        loads[least] += cost(name)
        if least == process():
            own.append(name)
    results = {name: x for part in gathered({name: work(name) for name in own}) for name, x in part.items()}
    yield from ((name, results[name]) for name in names)
