"""Manifests of Kubernetes: valid by its own schemas, and with the words of the verb as they were."""

import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tutti.launch.cluster.job import ClusterJob
from tutti.launch.cluster.kubernetes import Kubernetes, manifests, servers, submit, text, write

VERSIONS = "1.31", kubernetes_validate.latest_version()  # podFailurePolicy is stable from 1.31 on
NASTY = [
    "a b",
    "$(POD)",
    "$HOME",
    "line\n- break: 1",
    "# no comment",
    "'",
    '"',
    "",
    "yes",
    "1.0",
    "{a: b}",
    "&x",
    "\u00e9",
]


def job(tmp_path: Path, **changes) -> ClusterJob:
    values = {"words": ("train", "a.toml"), "name": "demo", "folder": tmp_path, "nodes": 3, "processes": 4}
    return ClusterJob(**{**values, **changes})


FULL = Kubernetes("registry.org/me/tutti:1", "research", ("data:/data", "models:/models"), ("A=b=c $(D)",), "/data",
                  {"nodeSelector": {"gpu": "a100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
                   "volumes": [{"name": "more", "emptyDir": {}}]})  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("own", [Kubernetes("tutti"), FULL])
def test_the_schemas_accept_all_manifests(tmp_path, version, own):
    documents = manifests(job(tmp_path, min_nodes=2, gpus=4, memory="64G"), own)
    documents += servers(job(tmp_path, replicas=2, words=("serve", "m")), own, ["m"], 8000)
    assert [x["kind"] for x in documents] == ["Service", "Job", "Service", "Deployment", "PodDisruptionBudget"]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_manifest_is_noticed(tmp_path):
    (_, wrong) = manifests(job(tmp_path), FULL)
    wrong["spec"]["completionModus"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError, match="completionModus"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_pods_meet_at_the_first_and_evictions_do_not_count(tmp_path):
    service, workload = manifests(job(tmp_path, min_nodes=2, requeues=5, grace=300), FULL)
    spec, pod = workload["spec"], workload["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["backoffLimit"] == 15 and pod["terminationGracePeriodSeconds"] == 300
    assert pod["restartPolicy"] == "Never" and pod["subdomain"] == service["metadata"]["name"]
    words = pod["containers"][0]["command"]
    assert {"--min=2", "--max=3", "--meet=demo-0.demo:29400", "--processes=4", "--grace=290"} <= set(words)
    assert "--logs=/data/launch/demo/logs/$(POD)" in words
    assert pod["nodeSelector"] == {"gpu": "a100"} and len(pod["volumes"]) == 4


def expanded(word: str) -> str:
    """What Kubernetes makes of a word: $(POD) is a variable, $$ is a $."""
    parts = word.split("$$")
    return "$".join(x.replace("$(POD)", "pod-1") for x in parts)


def test_words_survive(tmp_path):
    documents = manifests(job(tmp_path, words=("train", *NASTY)), FULL)
    again = list(yaml.safe_load_all(text(documents)))
    assert again == documents
    words = [expanded(x) for x in again[1]["spec"]["template"]["spec"]["containers"][0]["command"]]
    assert words[words.index("tutti.cli", 4) :] == ["tutti.cli", "train", *NASTY]
    assert "--logs=/data/launch/demo/logs/pod-1" in words


def test_servers_are_probed_and_answer_to_their_service(tmp_path):
    documents = servers(job(tmp_path, replicas=2, words=("serve", "m")), FULL, ["m", "--keys", "a"], 9000)
    container = documents[1]["spec"]["template"]["spec"]["containers"][0]
    words = container["command"]
    assert documents[1]["spec"]["replicas"] == 2
    assert words[words.index("serve") :][:6] == ["serve", "m", "--keys", "a", "--host", "0.0.0.0"]
    assert words[-4:] == ["--allowed-hosts", "demo", "demo.research", "demo.research.svc.cluster.local"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["ports"] == [{"name": "http", "containerPort": 9000}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image": ""}, "--image '': give an image that has tutti"),
        ({"mounts": ("data",)}, "--mount 'data': give a PersistentVolumeClaim and a path"),
        ({"variables": ("A",)}, "--env 'A': give NAME=value"),
        ({"namespace": "A b"}, "--namespace 'A b'"),
    ],
)
def test_kubernetes_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        Kubernetes(**{"image": "tutti", **values})


@pytest.mark.starts
def test_kubectl_gets_the_file(tmp_path, monkeypatch):
    cluster_job = job(tmp_path / "job")
    path = write(cluster_job, manifests(cluster_job, FULL))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=f"no kubectl on this machine; where there is one: kubectl create -f {path}"):
        submit(path, cluster_job)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\necho "$@"\n')
    kubectl.chmod(0o755)
    assert submit(path, cluster_job) == f"create -f {path}\n"
    kubectl.write_text("#!/bin/sh\necho 'Error (AlreadyExists): jobs demo already exists' >&2; exit 1\n")
    with pytest.raises(ValueError, match=f"already exists; to run it again: kubectl delete -f {path}"):
        submit(path, cluster_job)
    assert json.dumps(list(yaml.safe_load_all(path.read_text())))
    assert subprocess.run([kubectl], capture_output=True).returncode == 1
