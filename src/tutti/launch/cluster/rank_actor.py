"""An actor of Ray that runs one rank of a job in a process of its own, and tells how it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.launch.cluster.ranks import RankPlace
from tutti.launch.launch import LOGS_VARIABLE, ORPHANS


@dataclass(frozen=True)
class Ended:
    """End of a process: its exit code, negative for a signal, and the error that it recorded, if any."""

    exit_code: int
    error: dict[str, Any] | None


class RankActor:
    """One rank. Its process ends with the actor. Methods may be called while `wait` waits."""

    def __init__(self):
        self.process: subprocess.Popen[bytes] | None = None
        self.scratch = tempfile.TemporaryDirectory(prefix="tutti-")

    def place(self) -> RankPlace:
        """The place where this actor runs."""
        import ray
        from ray.util import get_node_ip_address

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return RankPlace(context.get_node_id(), get_node_ip_address(), tuple(map(str, gpus)))

    def free_port(self) -> int:
        """A port of this machine that is not in use."""
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    def start(self, python: str, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> int:
        """Start `python -u WORDS` in a folder, with further variables. Returns the process's number."""
        Path(variables[LOGS_VARIABLE]).mkdir(parents=True, exist_ok=True)
        defaults = {}
        if variables.get("GROUP_WORLD_SIZE") == "1" and "lo" in [name for _, name in socket.if_nameindex()]:
            defaults = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        own = {"TORCHELASTIC_ERROR_FILE": f"{self.scratch.name}/error.json", ORPHANS: str(int(signal.SIGKILL))}
        environment = {**os.environ, **defaults, **variables, **own}
        self.process = subprocess.Popen([python or sys.executable, "-u", *words], cwd=folder, env=environment)
        return self.process.pid

    def serve(self, python: str, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> str:
        """As `start`, with a port of this machine for "{port}" in the words. Returns the address of the server."""
        from ray.util import get_node_ip_address

        port = self.free_port()
        self.start(python, [x.replace("{port}", str(port)) for x in words], folder, variables)
        return f"http://{get_node_ip_address()}:{port}"

    def wait(self) -> Ended:
        """Wait for the end of the process."""
        assert self.process
        code = self.process.wait()
        path = Path(self.scratch.name, "error.json")
        return Ended(code, json.loads(path.read_text())["message"]["extraInfo"] if path.exists() else None)

    def stop(self, number: int, seconds: float) -> None:
        """Send the process a signal, and kill it if it is still there after so many seconds."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
