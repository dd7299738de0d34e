"""The verb `tutti launch`: run a verb on a cluster."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro

from tutti.launch.cluster.job import Job, name_of

Each = tyro.conf.UseAppendAction  # an option that may be repeated


@dataclass(frozen=True)
class Options:
    """Run a verb on a cluster: `tutti launch --slurm|--ray|--kubernetes [OPTIONS] -- VERB ARGS...`.

    Args:
        slurm: Write a batch script and submit it.
        ray: Run it on a cluster of Ray, as actors. This command stays until the job is done.
        kubernetes: Write manifests and apply them.
        nodes: Machines of the job.
        min_nodes: The job starts, and goes on after losing nodes, with as few; by default it needs all.
        processes: Ranks on each node.
        replicas: With serve: servers behind one port, each with an engine of its own.
        cpus_per_node: CPU cores of each node; by default one for each process.
        gpus_per_node: GPUs of each node.
        memory: Memory of each node, such as 64G.
        restarts: How often all ranks start again, from the newest checkpoint, when one fails.
        requeues: How often the cluster starts the job again after it was preempted or has reached its time limit.
        grace: Seconds to save a checkpoint before the job is ended.
        name: Of the job; by default that of the verb and its config file.
        folder: For what is written, and for logs: by default launch/NAME. All nodes must see it.
        python: The Python on the cluster's machines; by default this one, and with Kubernetes `python`.
        dry_run: Write and print what would be submitted, and stop.
        time: Slurm: time limit, such as 4:00:00 or 2-12 (days and hours).
        partition: Slurm: partition.
        account: Slurm: account.
        sbatch: Slurm: another option of sbatch, as in --sbatch=--constraint=a100; may be repeated.
        setup: Slurm: a line of shell before the ranks start, such as "module load cuda"; may be repeated.
    """

    slurm: bool = False
    ray: bool = False
    kubernetes: bool = False
    nodes: int = 1
    min_nodes: int = 0
    processes: int = 1
    replicas: int = 0
    cpus_per_node: int = 0
    gpus_per_node: int = 0
    memory: str = ""
    restarts: int = 3
    requeues: int = 20
    grace: int = 120
    name: str = ""
    folder: str = ""
    python: str = ""
    dry_run: bool = False
    time: str = ""
    partition: str = ""
    account: str = ""
    sbatch: Annotated[tuple[str, ...], Each] = field(default=())
    setup: Annotated[tuple[str, ...], Each] = field(default=())


CLUSTERS = {  # and the options that only they have
    "slurm": ("time", "partition", "account", "sbatch", "setup"),
    "ray": (),
    "kubernetes": (),
}


def launch(argv: list[str]) -> int | None:
    """Run `tutti launch`."""
    own, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = tyro.cli(Options, prog="tutti launch", args=own)
    cluster = chosen(options)
    job = job_of(options, words)
    from tutti.cli.launch_check import check_verb

    check_verb(words)
    return RUN[cluster](options, job)


def chosen(options: Options) -> str:
    """The cluster. Raises ValueError unless it is one, or if an option is of another one."""
    clusters = [name for name in CLUSTERS if getattr(options, name)]
    if len(clusters) != 1:
        named = " and ".join(f"--{name}" for name in clusters) or "no cluster"
        raise ValueError(f"{named}: give one of --slurm, --ray and --kubernetes")
    default = {f.name: None if f.default is MISSING else f.default for f in fields(options)}
    for other, names in CLUSTERS.items():
        for name in names:
            if getattr(options, name) != default[name] and name not in CLUSTERS[clusters[0]]:
                raise ValueError(f"--{name.replace('_', '-')} is an option of --{other}, not of --{clusters[0]}")
    return clusters[0]


def job_of(options: Options, words: list[str]) -> Job:
    """The job that the options describe."""
    name = options.name or name_of(tuple(words))
    return Job(
        words=tuple(words),
        name=name,
        folder=Path(options.folder or f"launch/{name}").absolute(),
        nodes=options.nodes,
        min_nodes=options.min_nodes,
        processes=options.processes,
        replicas=options.replicas,
        cpus=options.cpus_per_node,
        gpus=options.gpus_per_node,
        memory=options.memory,
        restarts=options.restarts,
        requeues=options.requeues,
        grace=options.grace,
        python=options.python or sys.executable,
    )


def on_slurm(options: Options, job: Job) -> None:
    from tutti.launch.cluster import slurm

    own = slurm.Slurm(options.time, options.partition, options.account, options.sbatch, options.setup)
    if options.dry_run:
        print(slurm.script(job, own, Path.cwd()), end="")
        return
    path = slurm.write(job, own, Path.cwd())
    number = slurm.submit(path)
    print(f"job     {number}, submitted from {path}")
    print(f"log     {job.folder}/logs/{number}.txt")
    print(f"ranks   {job.folder}/logs/{number}/attempt-0/rank-0.txt and others")
    print(f"cancel  scancel {number}")


RUN = {"slurm": on_slurm}
