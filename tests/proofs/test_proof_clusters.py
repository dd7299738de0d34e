"""Claim: a job of `tutti launch` that is preempted, loses a rank or loses a node goes on from its last checkpoint, on
Slurm and on Ray, and ends with the losses of a run that was left alone, bit for bit on the same number of ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs import PATIENCE, TINY, places
from slurm_cluster import SlurmCluster, missing
from tutti.launch.cluster.job import ClusterJob
from tutti.launch.cluster.kubernetes import STOPPED, Kubernetes, manifests
from tutti.train.text.history import read, series

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
import tiny

try:
    from ray.cluster_utils import Cluster
except ModuleNotFoundError:
    Cluster = None

STEPS = 240
TRAIN = [
    *TINY,
    *("--batch.size", "12", "--model.hidden-size", "48", "--model.num-attention-heads", "3"),
    *("--schedule.steps", str(STEPS), "--checkpoint.every", "25", "--eval.every", "120", "--parallel.plan", "zero3"),
]
NAMES = "loss", "held_out_loss", "learning_rate"
CPU = {"OMP_NUM_THREADS": "1", "TUTTI_PLANS": "off"}


def tutti(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "tutti.cli", *words], capture_output=True, text=True,
                          env={**(environment or os.environ), **CPU})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> Path:
    """The run that was left alone, on two ranks."""
    out = tmp_path_factory.mktemp("alone") / "run"
    tutti("run", "-n", "2", "-m", "tutti.cli", "train", *places(text, out), *TRAIN)
    return out


def steps(out: Path) -> int:
    """The steps that a run has done."""
    return max(series(read(out), "loss")[0], default=0)


def wait_for(true: Callable[[], bool], what: str, said: Callable[[], str] = str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"{what}\n{said()}"
        time.sleep(0.05)


def words_of(process: int) -> list[str]:
    """The command line of a process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def processes_with(word: str) -> list[int]:
    """The Python processes with a word in their command line, except launchers."""
    numbers = [int(x.name) for x in Path("/proc").glob("[0-9]*")]
    lines = {number: words_of(number) for number in numbers}
    return [number for number, words in lines.items()
            if word in words and "python" in words[0] and "launch" not in words]  # fmt: skip


def processes_of(rank: int, out: Path) -> list[int]:
    """The processes of a rank of the run that writes into a folder."""
    pids = processes_with(str(out))
    return [x for x in pids if f"RANK={rank}".encode() in Path(f"/proc/{x}/environ").read_bytes().split(b"\0")]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_slurm(text, alone, tmp_path):
    out, folder = tmp_path / "a run", tmp_path / "job"
    with SlurmCluster(tmp_path / "slurm") as cluster:
        options = ["--slurm", "--nodes", "2", "--time", "60", "--grace", "30", "--folder", str(folder)]
        done = tutti("launch", *options, "--", "train", *places(text, out), *TRAIN, environment=cluster.environment)
        job = done.stdout.split()[1].rstrip(",")

        def said() -> str:
            logs = sorted(folder.glob("logs/**/*.txt"))
            return "\n".join([*(f"{x}:\n{x.read_text()}" for x in logs), cluster.logs()])

        def log() -> str:
            return (folder / "logs" / f"{job}.txt").read_text()

        wait_for(lambda: steps(out) >= 60, "it trains", said)
        cluster.call("scancel", "--signal=TERM", job)
        wait_for(lambda: "stopped with status 143; requeued" in log(), "it requeues itself", said)
        stopped = steps(out)
        assert 60 <= stopped < STEPS
        wait_for(lambda: steps(out) >= stopped + 40, "it goes on", said)
        os.kill(processes_of(1, out)[0], signal.SIGKILL)
        restarted = folder / "logs" / job / "attempt-1" / "rank-1.restart-1.txt"
        wait_for(restarted.exists, "its ranks are started again", said)
        killed = steps(out)
        wait_for(lambda: steps(out) >= killed + 40, "it goes on after a rank was killed", said)
        cluster.call("scontrol", "requeue", job)
        wait_for(lambda: cluster.state(job) == "COMPLETED", "the end", said)
        first = [(folder / "logs" / job / f"attempt-{i}" / "rank-0.txt").read_text() for i in range(3)]
        assert f"continuing after step {stopped}," in first[1], "the checkpoint of the signal, not an earlier one"
        assert "continuing after step" in first[2] and "continuing after step" not in first[0]
    for name in NAMES:
        assert series(read(out), name) == series(read(alone), name), said()
    assert series(read(out), "loss")[0] == list(range(1, STEPS + 1))


class RayNodes:
    """A cluster of Ray with two nodes of one core each, both on this machine, and a head without cores."""

    def __enter__(self) -> RayNodes:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.shutdown()

    def launch(self, log: Path, *words: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "tutti.cli", "launch", "--ray", "--address", self.cluster.address, *words]
        with open(log, "w") as file:
            return subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **CPU})


def parent(process: int) -> int:
    """The number of the process that started a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def ray_nodes():
    with RayNodes() as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.skipif(Cluster is None, reason="ray is not installed: pip install 'tutti[ray]'")
def test_ray(text, alone, tmp_path, ray_nodes):
    """An actor is killed, then the process of a rank, then the launcher is interrupted and called again."""
    out, log, folder = tmp_path / "a run", tmp_path / "log.txt", tmp_path / "job"
    words = ["--nodes", "2", "--folder", str(folder), "--", "train", *places(text, out), *TRAIN]
    job = ray_nodes.launch(log, *words)
    try:
        wait_for(lambda: steps(out) >= 60, "it trains", log.read_text)
        os.kill(parent(processes_of(1, out)[0]), signal.SIGKILL)
        wait_for(lambda: "its actor or its node is gone" in log.read_text(), "the loss is noticed", log.read_text)
        lost = steps(out)
        wait_for(lambda: steps(out) >= max(lost, 75) + 20, "it goes on", log.read_text)
        os.kill(processes_of(0, out)[0], signal.SIGKILL)
        wait_for(lambda: "rank 0 of 2 was killed by SIGKILL" in log.read_text(), "it is named", log.read_text)
        killed = steps(out)
        wait_for(lambda: steps(out) >= killed + 20, "it goes on", log.read_text)
        job.terminate()
        assert job.wait(PATIENCE) == 128 + signal.SIGTERM, log.read_text()
        stopped = steps(out)
        assert (out / "checkpoints" / f"step-{stopped:08d}" / "manifest.json").exists()
        job = ray_nodes.launch(log, *words)
        assert job.wait(PATIENCE) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    for name in NAMES:
        assert series(read(out), name) == series(read(alone), name)
    assert len(list(folder.glob("logs/*/attempt-*/rank-1*.txt"))) == 4


@pytest.mark.slow
@pytest.mark.skipif(Cluster is None, reason="ray is not installed: pip install 'tutti[ray]'")
def test_ray_goes_on_with_fewer_nodes(text, alone, tmp_path, ray_nodes):
    out, log = tmp_path / "run", tmp_path / "log.txt"
    words = ["--nodes", "2", "--min-nodes", "1", "--folder", str(tmp_path / "job")]
    job = ray_nodes.launch(log, *words, "--", "train", *places(text, out), *TRAIN)
    try:
        wait_for(lambda: steps(out) >= 60, "it trains", log.read_text)
        ray_nodes.cluster.remove_node(ray_nodes.nodes[1], allow_graceful=False)
        assert job.wait(PATIENCE) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    assert "on 1 of 2 nodes" in log.read_text()
    for name in NAMES:
        (value_steps, values), (expected_steps, expected) = series(read(out), name), series(read(alone), name)
        assert value_steps == expected_steps and values == pytest.approx(expected, rel=1e-4)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def health(port: int) -> dict[str, Any]:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).json()
    except httpx.HTTPError:
        return {"ready": 0, "restarts": 0}


class Asking:
    """Asks a server without a pause while the block runs. failures: errors, and answers unlike the first."""

    def __init__(self, port: int, model: str):
        self.body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0}
        self.url, self.over = f"http://127.0.0.1:{port}/v1/completions", threading.Event()
        self.texts: list[str] = []
        self.failures: list[str] = []

    def __enter__(self) -> Asking:
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def _ask(self) -> None:
        while not self.over.is_set():
            answer = httpx.post(self.url, json=self.body, timeout=120)
            if answer.status_code == 200:
                self.texts.append(answer.json()["choices"][0]["text"])
            else:
                self.failures.append(answer.text)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


SERVE = ["--most", "2", "--budget", "16", "--memory", "0.01"]


def answers_while_one_is_killed(port: int, model: Path, said: Callable[[], str]) -> None:
    """One of two replicas is killed, and comes back; all requests are answered, with the same text."""
    wait_for(lambda: health(port)["ready"] == 2, "two replicas are ready", said)
    with Asking(port, model.name) as asking:
        wait_for(lambda: len(asking.texts) >= 5, "answers", said)
        servers = [x for x in processes_with(str(model)) if "0.0.0.0" in words_of(x)]
        assert len(servers) == 2, said()
        os.kill(servers[0], signal.SIGKILL)
        wait_for(lambda: health(port)["ready"] == 1, "one is gone", said)
        count = len(asking.texts)
        wait_for(lambda: len(asking.texts) >= count + 5, "the other one answers", said)
        wait_for(lambda: health(port)["ready"] == 2, "it has come back", said)
    assert len(asking.failures) <= 1, asking.failures  # one that the killed replica had begun to answer
    assert len(set(asking.texts)) == 1


@pytest.mark.slow
@pytest.mark.skipif(Cluster is None, reason="ray is not installed: pip install 'tutti[ray]'")
def test_replicas_on_ray(model, tmp_path, ray_nodes):
    log, port = tmp_path / "log.txt", free_port()
    job = ray_nodes.launch(log, "--replicas", "2", "--folder", str(tmp_path / "job"), "--", "serve", str(model),
                           "--port", str(port), *SERVE)  # fmt: skip

    def said() -> str:
        return log.read_text() + "\n".join(x.read_text() for x in tmp_path.glob("job/logs/**/*.txt"))

    try:
        answers_while_one_is_killed(port, model, said)
        job.terminate()
        assert job.wait(PATIENCE) == -signal.SIGTERM
    finally:
        job.kill()
        job.wait()
    assert not processes_with(str(model))


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_replicas_on_slurm(model, tmp_path):
    folder, port = tmp_path / "job", free_port()
    with SlurmCluster(tmp_path / "slurm") as cluster:
        options = ["--slurm", "--nodes", "2", "--replicas", "2", "--folder", str(folder)]
        words = ["serve", str(model), "--port", str(port), *SERVE]
        done = tutti("launch", *options, "--", *words, environment=cluster.environment)
        job = done.stdout.split()[1].rstrip(",")

        def said() -> str:
            return "\n".join([*(x.read_text() for x in folder.glob("logs/**/*.txt")), cluster.logs()])

        answers_while_one_is_killed(port, model, said)
        cluster.call("scancel", job)
        wait_for(lambda: cluster.state(job) == "CANCELLED", "the end", said)
        wait_for(lambda: not processes_with(str(model)), "the end of the servers", said)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_slurm_goes_on_with_fewer_nodes(text, alone, tmp_path):
    """A node of an elastic job is lost, with its daemon and all processes of the job there."""
    out, folder = tmp_path / "run", tmp_path / "job"
    with SlurmCluster(tmp_path / "slurm") as cluster:
        options = ["--slurm", "--nodes", "2", "--min-nodes", "1", "--folder", str(folder)]
        done = tutti("launch", *options, "--", "train", *places(text, out), *TRAIN, environment=cluster.environment)
        job = done.stdout.split()[1].rstrip(",")

        def said() -> str:
            return "\n".join([*(x.read_text() for x in sorted(folder.glob("logs/**/*.txt"))), cluster.logs()])

        wait_for(lambda: steps(out) >= 60, "it trains", said)
        cluster.lose(1)
        lost = steps(out)
        wait_for(lambda: steps(out) >= lost + 20, "it goes on", said)
        wait_for(lambda: steps(out) == STEPS, "it ends", said)
        cluster.call("scancel", job)
    for name in NAMES:
        (value_steps, values), (expected_steps, expected) = series(read(out), name), series(read(alone), name)
        assert value_steps == expected_steps and values == pytest.approx(expected, rel=1e-4)


class Pods:
    """The pods of a job of Kubernetes, as processes of this machine: a pod's command, where they meet here."""

    def __init__(self, folder: Path, job: ClusterJob):
        (_, manifest) = manifests(job, Kubernetes("tutti", mounts=(f"data:{folder}",)))
        words = manifest["spec"]["template"]["spec"]["containers"][0]["command"]
        self.folder, meet = folder, f"--meet=localhost:{free_port()}"
        self.words = [meet if x.startswith("--meet=") else x.replace("$$", "$") for x in words]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        name = f"pod-{len(self.processes)}"
        line = [sys.executable, *(x.replace("$(POD)", name) for x in self.words[1:])]
        with open(self.folder / f"{name}.txt", "w") as log:
            process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **CPU})
        self.processes.append(process)
        return process

    def said(self) -> str:
        return "\n".join(x.read_text() for x in sorted(self.folder.glob("**/*.txt")))

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_pods(text, alone, tmp_path):
    """A pod is evicted, and another one replaces it; then one is killed."""
    out = tmp_path / "a run"
    words = ("train", *places(text, out), *TRAIN)
    with Pods(tmp_path, ClusterJob(words=words, name="demo", folder=tmp_path, nodes=2)) as pods:
        first, second = pods.start(), pods.start()
        wait_for(lambda: steps(out) >= 60, "it trains", pods.said)
        second.terminate()
        assert second.wait(PATIENCE) == STOPPED, pods.said()
        stopped = steps(out)
        third = pods.start()
        wait_for(lambda: steps(out) >= stopped + 20, "it goes on", pods.said)
        third.kill()
        pods.start()
        assert first.wait(PATIENCE) == 0, pods.said()
        assert f"continuing after step {stopped}," in pods.said(), "all that the evicted pod did was saved"
    for name in NAMES:
        assert series(read(out), name) == series(read(alone), name)


AGENT = """
algorithm = "PPO"
env = "CartPole-v1"
steps = 512
level = "eager"
evaluate = 256

[options]
n_envs = 4
n_steps = 16
batch_size = 32
n_epochs = 2
hidden = [16]
"""


@pytest.mark.slow
@pytest.mark.skipif(Cluster is None, reason="ray is not installed: pip install 'tutti[ray]'")
def test_environments_on_ray(tmp_path, ray_nodes):
    """A launched run of reinforcement learning, whose environments are actors of the same cluster."""
    config, log = tmp_path / "agent.toml", tmp_path / "log.txt"
    config.write_text(AGENT)
    words = ["rl", "train", str(config), "--placement", "environments", "--ranks", "2"]
    tutti(*words, "--out", str(tmp_path / "here"))
    ray_nodes.cluster.add_node(num_cpus=2)
    job = ray_nodes.launch(log, "--folder", str(tmp_path / "job"), "--", *words, "--workers", "ray",
                           "--out", str(tmp_path / "there"))  # fmt: skip
    try:
        assert job.wait(PATIENCE) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    curves = [json.loads((tmp_path / x / "curve.json").read_text()) for x in ("here", "there")]
    assert curves[0] == curves[1] and curves[0][-1][0] == 512
    assert "saved in" in log.read_text(), "what rank 0 prints is shown"
