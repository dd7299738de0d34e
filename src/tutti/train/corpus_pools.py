"""Where the tasks of a corpus are done beyond one machine: by the ranks of a job, or by Ray.

Tasks are independent and their files lie in a folder that all machines see. What is done stays when a machine is lost.
Each rank and each worker of Ray does its tasks in a process of its own: a document that ends it or hangs is found and
left out, as on one machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from tutti.data.corpus.pool import ATTEMPTS, Failure, Processes
from tutti.data.corpus.tasks import Task
from tutti.launch.launch import rank, world_size
from tutti.progress import Count, silent

WAIT = 0.2  # seconds between two looks at the counter of finished tasks


class Ranks:
    """The ranks of a job, started by torchrun, `tutti run` or `tutti launch`, take tasks from a counter in the job's
    store.

    Every rank calls `run` with the same tasks. When a rank dies, the launcher restarts all.
    """

    def __init__(self) -> None:
        from torch import distributed

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._hosts = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = distributed.TCPStore(host, port, world_size(), self._hosts, timedelta(minutes=30))  # pyright: ignore
        name = f"tasks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store: Any = distributed.PrefixStore(name, store)  # pyright: ignore
        self._phase = 0
        self._process = Processes(1)
        self.workers, self.first = world_size(), rank() == 0

    def run(self, tasks: Sequence[Task], progress: Count = silent) -> list[Failure]:
        """Do tasks until none is left, and wait for the other ranks. All ranks get the failures of all."""
        self._phase += 1
        failures: list[Failure] = []
        while (index := self._add("next", 1) - 1) < len(tasks):
            failures += self._process.run([tasks[index]])
            progress(self._add("done", 1), len(tasks))
        while (done := self._add("done", 0)) < len(tasks):
            if self._store.add("closed", 0):
                raise RuntimeError("another rank has ended with an error")
            progress(done, len(tasks))
            time.sleep(WAIT)
        self._store.set(f"{self._phase}/failures/{rank()}", json.dumps([[f.task, f.why] for f in failures]))
        every = (self._store.get(f"{self._phase}/failures/{k}") for k in range(world_size()))
        return [Failure(*pair) for text in every for pair in json.loads(text)]

    def close(self) -> None:
        """End the process of this rank. The rank that has the store waits for the others, for at most a minute: one may
        be gone."""
        self._process.close()
        self._store.add("closed", 1)
        end = time.monotonic() + 60
        while self._hosts and self._store.add("closed", 0) < self.workers and time.monotonic() < end:
            time.sleep(WAIT)

    def _add(self, name: str, count: int) -> int:
        return self._store.add(f"{self._phase}/{name}", count)


class RayTasks:
    """A Ray cluster does tasks as Ray tasks of one core each: the cluster of RAY_ADDRESS, that which runs on this
    machine, or a new one.

    A task whose worker of Ray is lost, with its machine perhaps, starts again elsewhere, up to ATTEMPTS times.
    """

    first = True

    def __init__(self, address: str | None = None):
        import ray
        from ray.exceptions import RayError

        self._ray: Any = ray
        self._lost = RayError
        self._started = not ray.is_initialized()
        if self._started:
            self._ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level="warning")

    @property
    def workers(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def run(self, tasks: Sequence[Task], progress: Count = silent) -> list[Failure]:
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=0)(_done_by_ray)
        waiting = [k for k, task in enumerate(tasks) if task.done() is None]
        attempts = [0] * len(tasks)
        failures: list[Failure] = []
        done, total, running = 0, len(waiting), {}
        most = 2 * self.workers
        while waiting or running:
            while waiting and len(running) < most:
                index = waiting.pop(0)
                attempts[index] += 1
                running[remote.remote(tasks[index])] = index
            (first,), _ = ray.wait(list(running), num_returns=1)
            index = running.pop(first)
            try:
                why = ray.get(first)
                done += 1
            except self._lost as error:  # its worker or its machine is gone
                why = f"{type(error).__name__}, {ATTEMPTS} times"
                if attempts[index] < ATTEMPTS:
                    waiting.append(index)
                    continue
            if why:
                failures.append(Failure(tasks[index].name, why))
            progress(done, total)
        return failures

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


@cache
def _process() -> Processes:
    return Processes(1)


def _done_by_ray(task: Task) -> str:
    """Do a task in a worker of Ray. Returns why it failed, or an empty string."""
    failures = _process().run([task])
    return failures[0].why if failures else ""
