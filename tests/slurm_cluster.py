"""A Slurm cluster of two nodes on this machine, in a folder of its own: munged, slurmctld and two slurmd."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"
PATIENCE = 60  # seconds

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
ReturnToService=2
KillWait=20
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
SlurmdParameters=config_overrides
# Two nodes with addresses of this machine's loopback.
NodeName={nodes[0]} NodeAddr={nodes[0]} Port={ports[1]} CPUs=4 RealMemory=16000
NodeName={nodes[1]} NodeAddr={nodes[1]} Port={ports[2]} CPUs=4 RealMemory=16000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Why a cluster cannot be started here, or an empty text."""
    if os.geteuid() != 0:
        return "only root can start a Slurm cluster"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return (
        f"Slurm is not installed: there is no {', '.join(absent)} (Debian: apt-get install slurm-wlm)" if absent else ""
    )


class SlurmCluster:
    """Within the block the cluster runs. `environment`: for sbatch and the others, to talk to this cluster."""

    nodes = "127.0.0.1", "127.0.0.2"

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                folder=self.folder, ports=_free_ports(3), nodes=self.nodes, host=socket.gethostname().partition(".")[0]
            )
        )
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        try:
            self._start("munged", "--foreground", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                        f"--pid-file={self.folder}/munge.pid", f"--seed-file={self.folder}/munge.seed",
                        f"--log-file={self.folder}/munge.log", "--force")  # fmt: skip
            self._until(lambda: (self.folder / "munge.socket").exists(), "munged listens")
            self._start("slurmctld", "-D", "-i")
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node)
            self._until(lambda: self.states() == ["idle"] * len(self.nodes), "the nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def lose(self, number: int) -> None:
        """Kill the daemon of a node, and all that jobs have started there."""
        name = self.nodes[number].encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            on_it = (
                b"SLURMD_NODENAME=" + name in variables and f"SLURM_CONF={self.folder}/slurm.conf".encode() in variables
            )
            daemon = self.daemons[-len(self.nodes) + number].pid == int(folder.name)
            step = (
                words.startswith(b"slurmstepd") and self._parent(folder) == self.daemons[-len(self.nodes) + number].pid
            )
            if on_it or daemon or step:
                os.kill(int(folder.name), signal.SIGKILL)

    @staticmethod
    def _parent(folder: Path) -> int:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])

    def states(self) -> list[str]:
        """The states of the nodes."""
        done = subprocess.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%t"], env=self.environment,
                              capture_output=True, text=True)  # fmt: skip
        return done.stdout.split()

    def call(self, *command: str) -> str:
        """What a command of Slurm prints. Raises CalledProcessError if it fails."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def state(self, job: str) -> str:
        """The state of a job."""
        shown = self.call("scontrol", "show", "job", "-o", job)
        return shown.partition("JobState=")[2].split()[0]

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"{x.name}: " + "\n".join(x.read_text(errors="replace").splitlines()[-20:]) for x in files)

    def _start(self, *command: str) -> None:
        log = open(self.folder / f"{command[0]}-{len(self.daemons)}.out", "w")  # noqa: SIM115
        daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        log.close()
        self.daemons.append(daemon)

    def _until(self, true, what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"{what}\n{self.logs()}"
            assert all(x.poll() is None for x in self.daemons), self.logs()
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for x in sockets:
        x.bind(("127.0.0.1", 0))
    ports = [x.getsockname()[1] for x in sockets]
    for x in sockets:
        x.close()
    return ports
