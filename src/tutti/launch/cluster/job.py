"""A job on a cluster: which verb runs, on how many nodes, and what happens when it is stopped or a process dies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tutti.launch.launch import LAST_CALL

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")  # what Slurm, Ray and Kubernetes all accept


@dataclass(frozen=True)
class ClusterJob:
    """Description of a job, common to all clusters.

    words: the verb and its arguments. nodes, min_nodes: it starts with at most so many nodes, and goes on with as few
    (0: all). processes: number of processes on each node. cpus, gpus, memory: CPU cores, GPUs and memory of each node;
    memory such as 64G, or "". replicas: servers behind one port instead of one job; 0 for a job. router: the arguments
    of their router, where it is a server, too. restarts: how often all ranks start again when one fails. requeues: how
    often the cluster starts the job again after it was stopped. grace: seconds that ranks have to save a checkpoint
    when the job is stopped. folder: folder of the script and the logs. python: the interpreter there; by default this
    one, or that of the cluster's processes.
    """

    words: tuple[str, ...]
    name: str
    folder: Path
    nodes: int = 1
    min_nodes: int = 0
    processes: int = 1
    replicas: int = 0
    router: tuple[str, ...] = ()
    cpus: int = 0
    gpus: int = 0
    memory: str = ""
    restarts: int = 3
    requeues: int = 20
    grace: int = 120
    python: str = ""

    def __post_init__(self):
        if not self.words:
            raise ValueError("no verb: write it after --, as in `tutti launch --slurm -- train runs/demo.toml`")
        if not 1 <= self.least <= self.nodes:
            raise ValueError(f"--min-nodes {self.min_nodes} and --nodes {self.nodes}: give 1 <= --min-nodes <= --nodes")
        lowest = {"processes": 1, "replicas": 0, "cpus": 0, "gpus": 0, "restarts": 0, "requeues": 0, "grace": 0}
        for field, at_least in lowest.items():
            if (value := getattr(self, field)) < at_least:
                raise ValueError(f"--{OPTIONS.get(field, field)} is {value}; it must be at least {at_least}")
        if not NAME.fullmatch(self.name):
            raise ValueError(f"--name {self.name!r}: a name has at most 52 of a-z, 0-9 and -, as in demo-2")
        if self.memory and not re.fullmatch(r"[0-9]+[KMGT]", self.memory):
            raise ValueError(f"--memory {self.memory!r}: give a whole number with K, M, G or T, such as 64G")
        if self.gpus and self.processes > self.gpus and not self.replicas:
            raise ValueError(f"--processes {self.processes} on nodes with --gpus-per-node {self.gpus}: ranks do not "
                             "share GPUs, so give at most as many processes")  # fmt: skip
        if self.cpus and self.processes > self.cpus:
            raise ValueError(f"--processes {self.processes} on nodes with --cpus-per-node {self.cpus}: give each "
                             "process a core")  # fmt: skip

    @property
    def least(self) -> int:
        """The least nodes that it goes on with."""
        return self.min_nodes or self.nodes

    @property
    def verb(self) -> str:
        return self.words[0]

    @property
    def elastic(self) -> bool:
        """Whether it goes on with fewer nodes."""
        return self.least < self.nodes

    @property
    def cores(self) -> int:
        """CPU cores of a node."""
        return self.cpus or self.processes

    def target(self) -> list[str]:
        """The script or module that each rank runs, and its arguments."""
        return list(self.words[1:]) if self.verb == "run" else ["-m", "tutti.cli", *self.words]

    def limits(self) -> list[str]:
        """The options of `tutti run` on each node, except where nodes meet and how many there are."""
        return [
            f"--processes={self.processes}",
            f"--restarts={self.restarts}",
            f"--grace={max(1, self.grace - MARGIN)}",
        ]


OPTIONS = {"cpus": "cpus-per-node", "gpus": "gpus-per-node"}  # of the command line, where it has another name
MARGIN = 10  # seconds of the grace that are left for the launcher's own end
WAIT = 600  # seconds until the first node has to have an address
assert MARGIN > LAST_CALL


def name_of(words: tuple[str, ...]) -> str:
    """A name for a job of a verb: that of its config file, if there is one."""
    files = [Path(x).stem for x in words[1:] if Path(x).suffix in (".toml", ".yaml", ".yml", ".py")]
    text = "-".join([*words[:1], *files[:1]]).lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:50].strip("-") or "tutti"
