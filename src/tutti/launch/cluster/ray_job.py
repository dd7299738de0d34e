"""A job on Ray: each rank is an actor, and a placement group has the resources of the nodes.

When a rank fails or an actor is lost, with its node or alone, all ranks are stopped and started again, and go on from
the newest checkpoint. They take other nodes then, or fewer, down to the least that the job accepts.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.launch.cluster.job import MARGIN, ClusterJob
from tutti.launch.cluster.rank_actor import Ended, RankActor
from tutti.launch.cluster.ranks import environments, on_one_machine, order
from tutti.launch.interrupt import noted
from tutti.launch.launch import HANG, HANG_VARIABLE, LOGS_VARIABLE, Interrupted, LaunchError, failure, log_of

FEWER = 20.0  # seconds to wait for all nodes before an elastic job takes fewer
BAD_INPUT = 2  # exit code of a command line that cannot work
SETTLE = 2.0  # seconds in which other ranks' errors arrive: one of them may be the cause
KILL = 5.0  # seconds that ranks have to end after one has failed
LOST = "ActorLost"  # the kind of error of a rank whose actor is gone


@dataclass(frozen=True)
class Ray:
    """Options of a job on Ray. address: address of the cluster, "auto" for the one of this machine, or "" for the
    cluster that RAY_ADDRESS names, or a new one on this machine. wait: seconds for the cluster to have room."""

    address: str = ""
    wait: float = 600.0


def run(job: ClusterJob, ray: Ray, where: Path, logs: Path) -> None:
    """Run a job to its end, from this process.

    where: the folder that ranks run in. logs: the folder of their logs, with one for each attempt. Raises LaunchError
    after the last restart, and Interrupted after SIGTERM or SIGINT, once the ranks have saved a checkpoint.
    """
    connect(ray.address)
    failed = lost = 0
    with noted(signal.SIGTERM, signal.SIGINT) as received:
        while True:
            attempt = failed + lost
            with _actors(job, ray.wait, received) as actors:
                folder = logs / f"attempt-{attempt}"
                ended = _attempt(job, actors, where, folder, attempt, received)
            if received:
                raise Interrupted(received[0])
            codes = {rank: x.exit_code for rank, x in ended.items() if x.exit_code}
            if not codes:
                return
            errors = {rank: x.error for rank, x in ended.items() if x.error}
            error = failure(codes, errors, len(actors))
            is_lost = any(x.error and x.error["type"] == LOST for x in ended.values())
            failed, lost = failed + (not is_lost), lost + is_lost
            print(f"tutti launch: {error}\n  log: {folder}/rank-{error.rank}*.txt", file=sys.stderr, flush=True)
            if failed > job.restarts or lost > job.requeues or error.exit_code == BAD_INPUT:
                raise LaunchError(f"given up after {attempt + 1} attempts; the last error is above", error.rank,
                                  error.kind, plain=True, exit_code=error.exit_code)  # fmt: skip
            print(f"tutti launch: all ranks start again, from the newest checkpoint (attempt {attempt + 1})",
                  file=sys.stderr, flush=True)  # fmt: skip


def connect(address: str) -> None:
    """Join a cluster, or start one on this machine."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("there is no package ray: pip install 'tutti[ray]'") from None
    if ray.is_initialized():
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(f"there is no cluster of Ray at --address {address}: {error}") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init replaces it


@contextmanager
def _actors(job: ClusterJob, wait: float, received: Sequence[int]) -> Iterator[list[Any]]:
    """Actors for all ranks, in no order, on as many nodes as there are."""
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = place(job, wait, received)
    actors = []
    try:
        kind: Any = ray.remote(RankActor)
        for bundle in range(group.bundle_count):
            for _ in range(job.processes):
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                actor = kind.options(max_concurrency=4, scheduling_strategy=strategy, **resources(job))
                actors.append(actor.remote())
        yield actors
    finally:
        released(actors)
        with suppress(Exception):  # the connection to the cluster may be lost
            remove_placement_group(group)


def resources(job: ClusterJob) -> dict[str, float]:
    """Resources of an actor that has a process of a node to itself."""
    amounts = {"num_cpus": job.cores / job.processes, "num_gpus": job.gpus / job.processes}
    return amounts | ({"memory": _bytes(job.memory) / job.processes} if job.memory else {})


def released(actors: Sequence[Any]) -> None:
    """End actors, with their processes."""
    import ray

    for actor in actors:
        with suppress(Exception):  # it may have died, or the connection to the cluster may be lost
            ray.kill(actor)


def place(job: ClusterJob, wait: float, received: Sequence[int]) -> Any:
    """A placement group with a bundle for each node. Raises ValueError if there is no room in time, and Interrupted
    once a signal is received."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": float(job.cores), **({"GPU": float(job.gpus)} if job.gpus else {}),
              **({"memory": float(_bytes(job.memory))} if job.memory else {})}  # fmt: skip
    end, announced = time.monotonic() + wait, False
    while True:
        for count in range(job.nodes, job.least - 1, -1):
            group = placement_group([bundle] * count, strategy="SPREAD")
            end_of_patience = time.monotonic() + (min(FEWER, wait) if count == job.nodes else 1.0)
            while not (there := group.wait(1)) and time.monotonic() < end_of_patience and not received:
                pass
            if received:
                remove_placement_group(group)
                raise Interrupted(received[0])
            if there:
                if count < job.nodes:
                    print(f"tutti launch: on {count} of {job.nodes} nodes", file=sys.stderr, flush=True)
                return group
            remove_placement_group(group)
        free = ", ".join(f"{ray.available_resources().get(key, 0):g} {key}" for key in bundle)
        need = ", ".join(f"{value:g} {key}" for key, value in bundle.items())
        if time.monotonic() >= end:
            raise ValueError(f"the cluster has no room for {job.least} nodes with {need} each after {wait:g} s (--wait)"
                             f"; free are {free} in all")  # fmt: skip
        if not announced:
            print(f"tutti launch: waiting for {job.least} nodes with {need} each; free are {free} in all",
                  file=sys.stderr, flush=True)  # fmt: skip
            announced = True


def _bytes(memory: str) -> int:
    return int(memory[:-1]) << 10 * (1 + "KMGT".index(memory[-1]))


def _attempt(job: ClusterJob, actors: list[Any], where: Path, logs: Path, attempt: int,
             received: Sequence[int]) -> dict[int, Ended]:  # fmt: skip
    """Start all ranks, and wait until all have ended well or one has failed. Returns how each rank ended, if it has."""
    import ray
    from ray.exceptions import RayError

    try:
        places = ray.get([actor.place.remote() for actor in actors])
        ordered = order(places)
        ranks, places = [actors[i] for i in ordered], on_one_machine([places[i] for i in ordered])
        port: Any = ray.get(ranks[0].free_port.remote())
        variables = environments(places, port, attempt, job.restarts + job.requeues, job.name)
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, job.cores // job.processes)))
        more = {LOGS_VARIABLE: str(logs), HANG_VARIABLE: str(HANG), "OMP_NUM_THREADS": threads,
                "RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # fmt: skip
        words = ["-m", "tutti.launch.worker", *job.target()]
        ray.get([x.start.remote(job.python, words, str(where), {**v, **more})
                 for x, v in zip(ranks, variables, strict=True)])  # fmt: skip
    except RayError as error:
        return {0: _lost(error)}
    addresses = list(dict.fromkeys(x.address for x in places))
    print(f"attempt {attempt}: {len(ranks)} ranks on {', '.join(addresses)}; logs in {logs}/rank-*.txt", flush=True)
    tail = Tail(log_of(logs, 0, attempt))
    waiting = {x.wait.remote(): rank for rank, x in enumerate(ranks)}
    ended: dict[int, Ended] = {}
    end: float | None = None  # of waiting, once a rank has failed
    stopping = False
    while waiting and (end is None or time.monotonic() < end):
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=0.2)
        tail.show()
        for ref in done:
            rank = waiting.pop(ref)
            try:
                ended[rank] = ray.get(ref)
            except RayError as error:
                ended[rank] = _lost(error)
            if ended[rank].exit_code and end is None and not stopping:
                end = time.monotonic() + SETTLE
        if received and not stopping:
            stopping, seconds = True, max(1, job.grace - MARGIN)
            end = time.monotonic() + job.grace
            _stop(ranks, signal.SIGTERM, seconds, wait=False)
    if waiting:
        _stop([ranks[rank] for rank in waiting.values()], signal.SIGTERM, KILL, wait=True)
    tail.show()
    return ended


class Tail:
    """Prints what is appended to a file, if this machine sees it."""

    def __init__(self, path: Path):
        self.path, self.position = path, 0

    def show(self) -> None:
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.position)
            text = file.read()
            self.position += len(text)
            sys.stdout.buffer.write(text)
            sys.stdout.flush()


def _stop(actors: Sequence[Any], number: int, seconds: float, wait: bool) -> None:
    """Send a signal to ranks, and kill those that are there after so many seconds."""
    import ray

    requests = [x.stop.remote(int(number), seconds) for x in actors]
    if wait:
        ray.wait(requests, num_returns=len(requests), timeout=seconds + KILL)


def _lost(error: Exception) -> Ended:
    """The end of a rank whose actor is gone."""
    text = next((x for x in str(error).splitlines() if x.strip()), type(error).__name__)
    record = {"type": LOST, "text": f"its actor or its node is gone: {text}", "frame": "", "time_ns": 0}
    return Ended(128 + signal.SIGKILL, record)
