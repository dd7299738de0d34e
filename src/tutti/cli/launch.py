"""The verb `tutti launch`: run a verb on a cluster."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from tutti.launch.cluster.job import ClusterJob, name_of

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
        name: Name of the job; by default that of the verb and its config file.
        folder: Folder for what is written, and for logs; by default launch/NAME. All nodes must see it.
        python: The Python on the cluster's machines; by default this one, and with Kubernetes `python`.
        dry_run: Print what would be submitted, and stop.
        time: Slurm: time limit, such as 4:00:00 or 2-12 (days and hours).
        partition: Slurm: partition.
        account: Slurm: account.
        sbatch: Slurm: another option of sbatch, as in --sbatch=--constraint=a100; may be repeated.
        image: Kubernetes: a container image with tutti.
        namespace: Kubernetes: namespace.
        mount: Kubernetes: a PersistentVolumeClaim and where it is mounted, as in --mount data:/data; may be repeated.
            Logs of ranks are written to the first one.
        env: Kubernetes: a variable, as in --env HF_HOME=/data/hub; may be repeated.
        workdir: Kubernetes: the folder in the container that ranks run in.
        pod: Kubernetes: a YAML file with further fields of the pods, such as nodeSelector and tolerations.
        address: Ray: address of the cluster; by default what RAY_ADDRESS names, or a new one on this machine.
        wait: Ray: seconds for the cluster to have room.
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
    image: str = ""
    namespace: str = "default"
    mount: Annotated[tuple[str, ...], Each] = field(default=())
    env: Annotated[tuple[str, ...], Each] = field(default=())
    workdir: str = ""
    pod: Path | None = None
    address: str = ""
    wait: float = 600.0


CLUSTERS = {  # and the options that only they have
    "slurm": ("time", "partition", "account", "sbatch", "setup"),
    "ray": ("address", "wait"),
    "kubernetes": ("image", "namespace", "mount", "env", "workdir", "pod"),
}


def launch(argv: list[str]) -> int | None:
    """Run `tutti launch`."""
    own, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = tyro.cli(Options, prog="tutti launch", args=own, config=(tyro.conf.FlagCreatePairsOff,))
    cluster = chosen(options)
    job = job_of(options, words)
    from tutti.cli.launch_check import check_verb, parsed

    check_verb(words, here=cluster != "kubernetes")
    if bool(options.replicas) != (job.verb == "serve"):
        raise ValueError("serve needs --replicas, such as --replicas 1" if job.verb == "serve" else
                         f"--replicas is for serve, not for {job.verb}")  # fmt: skip
    served: dict[str, Any] = {}
    if job.verb == "serve":
        from tutti.serve.command import arguments_of_router, arguments_of_worker, serve
        from tutti.serve.server.limits import Access

        served = parsed(serve, "tutti serve", words[1:])
        Access(served["keys"])  # checks the keys
        job = replace(job, words=("serve", *arguments_of_worker(served)), router=tuple(arguments_of_router(served)))
    return RUN[cluster](options, job, served)


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


def job_of(options: Options, words: list[str]) -> ClusterJob:
    """The job that the options describe."""
    name = options.name or name_of(tuple(words))
    return ClusterJob(
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
        python=options.python,
    )


def on_slurm(options: Options, job: ClusterJob, served: dict[str, Any]) -> None:
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


def on_ray(options: Options, job: ClusterJob, served: dict[str, Any]) -> None:
    from tutti.launch.cluster import ray_job

    if options.dry_run:
        raise ValueError("--dry-run has no effect with --ray: nothing is written, and the job runs from here")
    own = ray_job.Ray(options.address, options.wait)
    logs = job.folder / "logs" / time.strftime("%Y%m%d-%H%M%S")
    if served:
        from tutti.serve.server import ray_replica

        return ray_replica.serve(job, own, Path.cwd(), logs, served)
    ray_job.run(job, own, Path.cwd(), logs)


def on_kubernetes(options: Options, job: ClusterJob, served: dict[str, Any]) -> None:
    from tutti.launch.cluster import kubernetes

    pod = {}
    if options.pod:
        from tutti.config.files import read

        if options.pod.suffix not in (".yaml", ".yml"):
            raise ValueError(f"--pod {options.pod}: give a YAML file with fields of a pod's spec")
        pod = read(options.pod)
    own = kubernetes.Kubernetes(options.image, options.namespace, options.mount, options.env, options.workdir, pod)
    documents = (
        kubernetes.servers(job, own, job.words[1:], served["port"]) if served else kubernetes.manifests(job, own)
    )
    if options.dry_run:
        print(kubernetes.text(documents), end="")
        return
    path = kubernetes.write(job, documents)
    print(kubernetes.submit(path, job), end="")
    label = f"--namespace {own.namespace} --selector app.kubernetes.io/name={job.name}"
    if served:
        print(f"forward   kubectl port-forward --namespace {own.namespace} service/{job.name} {served['port']}")
    print(f"pods      kubectl get pods {label}")
    print(f"launcher  kubectl logs --prefix --follow {label}")
    if options.mount and not served:
        print(
            f"ranks     {kubernetes.logs(job, own)}/POD/rank-*.txt, on the volume {options.mount[0].partition(':')[0]}"
        )
    print(f"delete    kubectl delete -f {path}")


RUN = {"slurm": on_slurm, "ray": on_ray, "kubernetes": on_kubernetes}
