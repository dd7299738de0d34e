"""A job of Kubernetes: manifests, and their submission by kubectl.

Each node is a pod of an Indexed Job and runs `tutti run`; a headless Service gives the pods names, and they meet at pod
0. A pod that is deleted gets SIGTERM, and its ranks save a checkpoint; the Job replaces it, without counting evictions,
and all ranks go on from there. Servers are a Deployment with as many pods as replicas, behind a Service.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.launch.cluster.job import WAIT, ClusterJob

PORT = 29400  # of the rendezvous
BAD_INPUT = 2  # exit code of a command line that cannot work
STOPPED = 143  # exit code after SIGTERM, with a checkpoint
DRAIN = 70  # seconds in which a server finishes what it has


@dataclass(frozen=True)
class Kubernetes:
    """Options of a job on Kubernetes. mounts: claims of volumes and where they are mounted, as data:/data.
    variables: environment variables, as NAME=value. workdir: the folder that ranks run in. pod: further fields of the
    pods' spec, such as {"nodeSelector": {"gpu": "a100"}}."""

    image: str
    namespace: str = "default"
    mounts: Sequence[str] = ()
    variables: Sequence[str] = ()
    workdir: str = ""
    pod: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.image or re.search(r"\s", self.image):
            raise ValueError(f"--image {self.image!r}: give an image that has tutti, such as registry.org/me/tutti:1")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self.namespace):
            raise ValueError(f"--namespace {self.namespace!r}: a namespace has a-z, 0-9 and - only")
        for mount in self.mounts:
            if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/.*", mount):
                raise ValueError(f"--mount {mount!r}: give a PersistentVolumeClaim and a path, as data:/data")
        for variable in self.variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", variable, re.DOTALL):
                raise ValueError(f"--env {variable!r}: give NAME=value")


def manifests(job: ClusterJob, own: Kubernetes) -> list[dict[str, Any]]:
    """The manifests of ranks that train, evaluate or whatever else their verb does."""
    command = [job.python or "python", "-m", "tutti.cli", "run", f"--min={job.least}", f"--max={job.nodes}",
               f"--meet={job.name}-0.{job.name}:{PORT}", f"--wait={WAIT}", *job.limits()]  # fmt: skip
    if own.mounts:
        command.append(f"--logs={logs(job, own)}/$(POD)")
    container = _container(job, own, [*command, *map(_literal, job.target())])
    ignored = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [ignored, *(_on_exit(action, code) for action, code in (("Ignore", STOPPED), ("FailJob", BAD_INPUT)))]
    pod = {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "terminationGracePeriodSeconds": max(1, job.grace),
        **_volumes(own),
        "containers": [container],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.requeues * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(job)}, "spec": _over(pod, own.pod)},
    }
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(job),
             "ports": [{"name": "rendezvous", "port": PORT}]}  # fmt: skip
    return [
        _manifest(job, own, "v1", "Service", names),
        _manifest(job, own, "batch/v1", "Job", spec),
    ]


def servers(job: ClusterJob, own: Kubernetes, arguments: Sequence[str], port: int) -> list[dict[str, Any]]:
    """The manifests of replicas of a server. arguments: words after `tutti serve`, without the server's address."""
    names = [job.name, f"{job.name}.{own.namespace}", f"{job.name}.{own.namespace}.svc.cluster.local"]
    python = [job.python or "python", "-m"]
    launcher = ["tutti.cli", "run", f"--processes={job.processes}", "--hang=0", "-m"] if job.processes > 1 else []
    bound = ["--host", "0.0.0.0", "--port", str(port), "--allowed-hosts", *names]
    command = [*python, *launcher, "tutti.cli", "serve", *map(_literal, arguments), *bound]
    health = {"httpGet": {"path": "/health", "port": "http"}}
    container = {
        **_container(job, own, command),
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": {**health, "periodSeconds": 5, "failureThreshold": 360},
        "readinessProbe": {**health, "periodSeconds": 2, "failureThreshold": 1, "timeoutSeconds": 5},
        "livenessProbe": {**health, "periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5},
    }
    pod = {
        "terminationGracePeriodSeconds": max(job.grace, DRAIN),
        **_volumes(own),
        "containers": [container],
    }
    labels = {"matchLabels": _labels(job)}
    spec = {
        "replicas": job.replicas,
        "selector": labels,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
        "template": {"metadata": {"labels": _labels(job)}, "spec": _over(pod, own.pod)},
    }
    ports = {"selector": _labels(job), "ports": [{"name": "http", "port": port, "targetPort": "http"}]}
    return [
        _manifest(job, own, "v1", "Service", ports),
        _manifest(job, own, "apps/v1", "Deployment", spec),
        _manifest(job, own, "policy/v1", "PodDisruptionBudget", {"maxUnavailable": 1, "selector": labels}),
    ]


def text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Manifests as YAML."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError("there is no package yaml: pip install 'tutti[train]'") from None

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    head = "# Written by `tutti launch --kubernetes`.\n"
    return head + "---\n".join(yaml.dump(dict(x), Dumper=Plain, sort_keys=False, width=120) for x in documents)


def write(job: ClusterJob, documents: Sequence[Mapping[str, Any]]) -> Path:
    """Write manifests into the job's folder."""
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / f"{job.name}.yaml"
    path.write_text(text(documents))
    return path


def submit(path: Path, job: ClusterJob) -> str:
    """Give a file to kubectl. Returns what it says. Raises ValueError if it fails."""
    verb = "apply" if job.replicas else "create"  # a Job runs once: to apply a finished one again does nothing
    if not shutil.which("kubectl"):
        raise ValueError(f"there is no kubectl on this machine; where there is one: kubectl {verb} -f {path}")
    done = subprocess.run(["kubectl", verb, "-f", str(path)], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        again = f"; to run it again: kubectl delete -f {path}" if "AlreadyExists" in said else ""
        raise ValueError(f"kubectl does not take {path}: {said}{again}")
    return done.stdout


def logs(job: ClusterJob, own: Kubernetes) -> str:
    """The folder of logs, on the first volume."""
    return f"{own.mounts[0].partition(':')[2].rstrip('/')}/launch/{job.name}/logs"


def _manifest(job: ClusterJob, own: Kubernetes, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    about = {"name": job.name, "namespace": own.namespace, "labels": _labels(job)}
    return {"apiVersion": version, "kind": kind, "metadata": about, "spec": spec}


def _labels(job: ClusterJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "tutti"}


def _on_exit(action: str, code: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": "tutti", "operator": "In", "values": [code]}}


def _container(job: ClusterJob, own: Kubernetes, command: list[str]) -> dict[str, Any]:
    each = {"cpu": str(job.cores)} | ({"memory": f"{job.memory}i"} if job.memory else {})
    gpus = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    memory = {"memory": each["memory"]} if job.memory else {}
    pod = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    pairs = [x.partition("=") for x in own.variables]
    return {
        "name": "tutti",
        "image": own.image,
        "command": command,
        **({"workingDir": own.workdir} if own.workdir else {}),
        "env": [pod, *({"name": name, "value": _literal(value)} for name, _, value in pairs)],
        "resources": {"requests": each | gpus, **({"limits": memory | gpus} if memory | gpus else {})},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": f"volume-{i}", "mountPath": x.partition(":")[2]} for i, x in enumerate(own.mounts)),
        ],
    }


def _volumes(own: Kubernetes) -> dict[str, Any]:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # 64 MB by default: too little for NCCL and data loaders
    claims = [{"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": x.partition(":")[0]}}
              for i, x in enumerate(own.mounts)]  # fmt: skip
    return {"volumes": [shm, *claims]}


def _literal(text: str) -> str:
    """A text in which Kubernetes replaces no $(NAME)."""
    return text.replace("$", "$$")


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables merged; values of `above` win, and lists are joined."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _over(merged[key], value)
        elif isinstance(value, list) and isinstance(merged.get(key), list):
            merged[key] = [*merged[key], *value]
        else:
            merged[key] = value
    return merged
