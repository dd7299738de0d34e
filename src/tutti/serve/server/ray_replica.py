"""Replicas of a server as actors of Ray, behind the router of the process that starts them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.launch.cluster.job import ClusterJob
from tutti.launch.cluster.rank_actor import RankActor
from tutti.launch.cluster.ray_job import Ray, connect, released, resources
from tutti.launch.launch import LOGS_VARIABLE
from tutti.serve.command import arguments_of_worker, route_to
from tutti.serve.server.router import Worker
from tutti.serve.values import Json


class RayReplica(Worker):
    """A server in an actor. words: its command, with "{port}". where: the folder that it runs in."""

    def __init__(self, job: ClusterJob, words: Sequence[str], where: Path, logs: Path):
        super().__init__()
        self.job, self.words, self.where, self.logs = job, words, where, logs
        self.actor: Any = None
        self.address: Any = ""

    def begin(self) -> None:
        import ray

        self.release()
        kind: Any = ray.remote(RankActor)
        self.actor = kind.options(max_concurrency=4, scheduling_strategy="SPREAD", **resources(self.job)).remote()
        variables = {LOGS_VARIABLE: str(self.logs), "TORCHELASTIC_RESTART_COUNT": str(self.starts),
                     "OMP_NUM_THREADS": str(self.job.cores)}  # fmt: skip
        self.address = ""
        self.begun = self.actor.serve.remote(self.job.python, self.words, str(self.where), variables)
        self.ended: Any = None

    @property
    def url(self) -> str:
        return self.address

    @property
    def alive(self) -> bool:
        import ray
        from ray.exceptions import RayError

        if self.actor is None:
            return False
        if not self.address:
            try:
                if ray.wait([self.begun], timeout=0)[0]:
                    self.address, self.ended = ray.get(self.begun), self.actor.wait.remote()
            except RayError:  # the actor has died
                self.actor = None
                return False
        return self.ended is None or not ray.wait([self.ended], timeout=0)[0]

    def ask_to_end(self) -> None:
        if self.address and self.alive:
            self.actor.stop.remote(int(signal.SIGTERM), float(max(1, self.job.grace)))

    def end(self, seconds: float) -> None:
        import ray

        if self.ended is not None:
            ray.wait([self.ended], timeout=seconds)
        self.release()

    def release(self) -> None:
        """Give the resources of the actor back."""
        if self.actor is not None:
            released([self.actor])
            self.actor = None


def serve(job: ClusterJob, own: Ray, where: Path, logs: Path, arguments: Json) -> None:
    """Serve with `job.replicas` actors until SIGTERM or Ctrl-C. arguments: those of `tutti serve`."""
    connect(own.address)
    words = ["-m", "tutti.launch.worker", "-m", "tutti.cli", "serve", *arguments_of_worker(arguments),
             "--host", "0.0.0.0", "--port", "{port}"]  # fmt: skip
    replicas = [RayReplica(job, words, where, logs / f"replica-{k}") for k in range(job.replicas)]
    route_to(replicas, arguments, f"{arguments['model']} by {job.replicas} replicas, with logs in {logs},")
