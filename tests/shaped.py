"""Machines on this one: network namespaces with addresses of their own, whose links can be made slow.

Linux alone has them, and root alone may make them. Rank i has the address 10.77.0.<i + 1>; what it sends passes a
queue of `tc`, in which each other rank has a class of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAST = "20gbit"


def sh(line: str) -> None:
    subprocess.run(line, shell=True, check=True, capture_output=True)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@contextmanager
def machines(ranks: int) -> Iterator[list[str]]:
    """Names of so many namespaces, each with a link `eth0` to a bridge. OSError where they may not be made."""
    bridge = f"tu{os.getpid() % 100000}"
    names = [f"{bridge}-{i}" for i in range(ranks)]
    try:
        sh(f"ip link add {bridge} type bridge && ip link set {bridge} up")
        for i, name in enumerate(names):
            sh(f"ip netns add {name} && ip link add {bridge}v{i} type veth peer name eth0 netns {name}")
            sh(f"ip link set {bridge}v{i} master {bridge} up")
            inside = f"ip netns exec {name}"
            sh(f"{inside} ip link set lo up && {inside} ip addr add {address(i)}/24 dev eth0")
            sh(f"{inside} ip link set eth0 up && {inside} tc qdisc add dev eth0 root handle 1: htb default 99")
            sh(f"{inside} tc class add dev eth0 parent 1: classid 1:99 htb rate {FAST} quantum 60000")
            for j in range(ranks):
                if j != i:
                    sh(f"{inside} tc class add dev eth0 parent 1: classid 1:{j + 1} htb rate {FAST} quantum 60000")
                    sh(f"{inside} tc filter add dev eth0 parent 1: protocol ip u32 match ip dst {address(j)} "
                       f"flowid 1:{j + 1}")  # fmt: skip
        yield names
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr.decode()) from None
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def set_link(target: int, rate: str) -> None:
    """The rate at which this process's machine sends to another one, as in "800mbit"."""
    sh(f"tc class change dev eth0 parent 1: classid 1:{target + 1} htb rate {rate} quantum 60000")


def run(script: Path, ranks: int, *args: str, seconds: float = 600) -> None:
    """Run a script as a Gloo job, a rank on each machine. Raises RuntimeError with what a rank said that failed."""
    with machines(ranks) as names:
        jobs = []
        for rank, name in enumerate(names):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": address(0),
                   "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, str(script), *args]
            jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        try:
            said = [job.communicate(timeout=seconds)[0].decode() for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        for rank, job in enumerate(jobs):
            if job.returncode:
                raise RuntimeError(f"rank {rank} failed:\n{said[rank]}")
