"""Start the processes of a job on this machine, and report in one message which rank failed and why.

`tutti run -n 4 script.py ARGS...` is `torchrun --standalone` with a readable error report. When a rank raises or dies,
the others are stopped, the exit code is not zero, and one message names the rank, its error and the line in the user's
code. TorchElastic does rendezvous, environment and supervision; `worker.py` runs in each process.
"""

import argparse
import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANG_VARIABLE = "TUTTI_HANG"  # in the environment of ranks: seconds without progress
LOGS_VARIABLE = "TUTTI_LOGS"  # in the environment of ranks: folder for what they print
ORPHANS = "TUTTI_ORPHANS"  # in the environment of ranks: the signal they get when their launcher has died
LAST_CALL = 3  # seconds to wait for more machines, once --min are there
HANG = 1800.0  # seconds without progress after which a job of `tutti run` ends
GRACE = 30  # seconds that ranks have after SIGTERM before they are killed

# Errors of ranks that only lost a peer.
_LOST_PEER = re.compile(r"gloo/transport|Connection (closed|reset) by peer|NCCL error|ncclRemoteError")


class LaunchError(RuntimeError):
    """A rank failed: `rank`, `kind` (type of its exception, "" if none), `trace`, `exit_code`. rank -1: no rank failed,
    but the machines lost each other.

    `plain`: the message suffices without a traceback, see `is_plain`.
    """

    def __init__(
        self, message: str, rank: int, kind: str = "", trace: str = "", plain: bool = False, exit_code: int = 1
    ):
        super().__init__(message)
        self.rank, self.kind, self.trace, self.plain, self.exit_code = rank, kind, trace, plain, exit_code


class Hang(RuntimeError):
    """The job was ended because a rank made no progress. The message names the rank."""


class Interrupted(Exception):
    """The launcher received a signal and stopped the job; `signal` is its number."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signal = signum


@dataclass(frozen=True)
class Failure:
    """End of one rank: `exit_code` is negative for a signal; `error` is what it recorded, or None."""

    rank: int
    exit_code: int
    error: dict[str, Any] | None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key that puts the cause before its consequences.

        First what a watchdog found; then ranks killed from outside, which leave no record; then errors by time; then
        ranks that the launcher stopped with SIGTERM; then ranks that only lost a peer.
        """
        if self.error is None:
            return (2 if self.exit_code == -signal.SIGTERM else 0, 0)
        if self.error["type"] == Hang.__name__:
            return (-1, self.error["time_ns"])
        return (3 if _LOST_PEER.search(self.error["text"]) else 1, self.error["time_ns"])

    def describe(self, world_size: int) -> str:
        who = f"rank {self.rank} of {world_size}"
        if self.error is not None:
            return f"{who} failed: {self.error['type']}: {self.error['text']}\n  {self.error['frame']}".rstrip()
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            hint = "; out of memory is the usual reason" if self.exit_code == -signal.SIGKILL else ""
            return f"{who} was killed by {name} (signal {-self.exit_code}{hint})"
        return f"{who} exited with code {self.exit_code}"


@dataclass(frozen=True)
class Machines:
    """Minimum and maximum number of machines of a job, and the `host:port` where they meet. That host has to stay."""

    least: int = 1
    most: int = 1
    meet: str = ""

    def __post_init__(self):
        if not 1 <= self.least <= self.most:
            raise ValueError(f"--min {self.least} and --max {self.most}: give 1 <= --min <= --max")
        if self.most > 1 and not re.fullmatch(r"[^:]+:[0-9]+", self.meet):
            raise ValueError("several machines need a meeting point: add --meet host:port, the same on each machine")

    def check_host(self, wait: float = 0) -> None:
        """Raise ValueError if the name of the host where machines meet has no address within `wait` seconds, or the
        port is none: a rank would try for minutes."""
        host, _, port = self.meet.rpartition(":")
        if not host:
            return
        if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 1 << 16:
            raise ValueError(f"--meet {self.meet}: the port must be a number up to {(1 << 16) - 1}")
        end = time.monotonic() + wait
        while True:
            try:
                socket.getaddrinfo(host.strip("[]"), int(port))
                return
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or time.monotonic() >= end:
                    why = getattr(error, "strerror", None) or error
                    raise ValueError(f"--meet {self.meet}: the host {host} cannot be found ({why})") from None
            time.sleep(1)

    @property
    def here(self) -> bool:
        """Whether the job runs on this machine only."""
        return not self.meet or self.meet.startswith(("localhost:", "127.0.0.1:"))


def launch(function: Callable[..., Any], processes: int, *args: Any, restarts: int = 0) -> list[Any]:
    """Call `function(*args)` in `processes` new processes and return the results in rank order.

    restarts: how often all processes restart when one fails.

    The function must be importable by name; arguments and results must be picklable. Inside, `torch.distributed`
    finds its usual environment variables (RANK, WORLD_SIZE, ...). Raises LaunchError if a rank fails.
    """
    if function.__module__ == "__main__":
        raise ValueError(f"launch cannot import {function.__qualname__} from __main__: move it into a module")
    with tempfile.TemporaryDirectory(prefix="tutti-") as scratch:
        payload = Path(scratch, "payload.pkl")
        payload.write_bytes(pickle.dumps((sys.path, pickle.dumps((function, args)))))
        _start(["--call", str(payload), scratch], processes, restarts)
        results = [Path(scratch, f"{rank}.pkl") for rank in range(processes)]
        for rank, path in enumerate(results):
            if not path.exists():
                raise LaunchError(f"rank {rank} of {processes} exited before {function.__qualname__} returned", rank)
        return [pickle.loads(path.read_bytes()) for path in results]


def run(argv: list[str]) -> int:
    """The verb `tutti run`. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tutti run",
        description="Run a script in several processes. For several machines, call it on each. "
        "Plain torchrun works too.",
    )
    parser.add_argument("-n", "--processes", type=int, default=1, help="processes on this machine (default: 1)")
    parser.add_argument(
        "--restarts", type=int, default=0, help="how often all ranks restart when one fails or dies (default: 0)"
    )
    parser.add_argument(
        "--hang", type=float, default=HANG, help="seconds without progress after which the job ends with an error that "
        f"names the rank that hangs; stacks of all threads are saved in ./stacks; 0: wait forever (default: {HANG:.0f})"
    )  # fmt: skip
    parser.add_argument("--min", type=int, default=1, help="minimum number of machines (default: 1)")
    parser.add_argument(
        "--max",
        type=int,
        help="maximum number of machines; when one is lost or added, all ranks restart (default: as --min)",
    )
    parser.add_argument("--meet", default="", help="host:port of one machine for rendezvous, the same on each")
    parser.add_argument(
        "--wait", type=float, default=0, help="seconds to wait for the host of --meet to have an address (default: 0)"
    )
    parser.add_argument(
        "--grace", type=int, default=GRACE,
        help=f"seconds that ranks have to save a checkpoint after SIGTERM, before they are killed (default: {GRACE})"
    )  # fmt: skip
    parser.add_argument(
        "--logs", type=Path, help="folder for what each rank prints, rank-0.txt and so on, instead of this terminal"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    parser.add_argument("script", help="the Python file to run in each process")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args(argv)
    if not args.module and not Path(args.script).is_file():
        raise ValueError(f"no file {args.script}")
    if args.restarts < 0:
        raise ValueError(f"--restarts is {args.restarts}; it must be 0 or more")
    if not args.hang >= 0:
        raise ValueError(f"--hang is {args.hang}; it must be more than 0 seconds, or 0 to wait forever")
    if args.grace < 0 or not args.wait >= 0:
        raise ValueError(f"--grace is {args.grace} and --wait is {args.wait}; both must be 0 seconds or more")
    machines = Machines(args.min, args.min if args.max is None else args.max, args.meet)
    machines.check_host(args.wait)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    try:
        _start([*(["-m"] if args.module else []), args.script, *args.args], args.processes, args.restarts,
               machines, args.hang or None, args.grace, args.logs)  # fmt: skip
    except LaunchError as e:
        print(f"{e.trace}tutti run: {e}", file=sys.stderr)
        if args.logs:
            print(f"log: {args.logs}/rank-{'' if e.rank < 0 else e.rank}*.txt", file=sys.stderr)
        return e.exit_code
    return 0


def under_launcher() -> bool:
    """Whether this process is already one rank of a job, started by torchrun or `tutti run`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """The rank of this process, or 0 without a job."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process among the processes of its job on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """The number of processes of this job, or 1 without a job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def machine_memory() -> Path:
    """A folder in memory that outlives the processes of this machine: $TUTTI_MEMORY or /dev/shm."""
    return Path(os.environ.get("TUTTI_MEMORY", "/dev/shm"))


def log_file() -> Path | None:
    """The file for what this rank prints, another one after each restart; or None for the launcher's output."""
    if not os.environ.get(LOGS_VARIABLE):
        return None
    return log_of(Path(os.environ[LOGS_VARIABLE]), rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def log_of(folder: Path, rank: int, restart: int) -> Path:
    """The file for what a rank prints after so many restarts."""
    return folder / f"rank-{rank}{f'.restart-{restart}' if restart else ''}.txt"


def hang() -> float | None:
    """Seconds without progress after which this job ends, or None to wait forever."""
    return float(os.environ[HANG_VARIABLE]) if os.environ.get(HANG_VARIABLE) else None


def is_plain(e: BaseException) -> bool:
    """Whether an error needs no traceback: a ValueError or OSError raised by this package, a Hang, or an OSError about
    a file."""
    if isinstance(e, Hang) or (isinstance(e, OSError) and e.filename is not None):
        return True
    frames = traceback.extract_tb(e.__traceback__)
    package, worker = Path(__file__).parents[1], Path(__file__).with_name("worker.py")
    raised_in = Path(frames[-1].filename) if frames else worker
    return isinstance(e, ValueError | OSError) and package in raised_in.parents and raised_in != worker


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(
    worker_args: list[str],
    processes: int,
    restarts: int = 0,
    machines: Machines = Machines(),
    hang: float | None = None,
    grace: int = GRACE,
    logs_of_ranks: Path | None = None,
) -> None:
    """Run `python -m tutti.launch.worker WORKER_ARGS` in every process and wait.

    Raises LaunchError when a process fails after its last restart, or the machine where all meet is lost."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from tutti.launch.listen import listen_where_named

    listen_where_named()
    if processes < 1:
        raise ValueError(f"the number of processes must be at least 1, not {processes}")
    with (
        tempfile.TemporaryDirectory(prefix="tutti-") as logs,
        _quiet(),
        _signals_restored(),
        _environment(processes, machines, hang, grace, logs_of_ranks),
    ):
        config = LaunchConfig(
            min_nodes=machines.least,
            max_nodes=machines.most,
            nproc_per_node=processes,
            run_id=machines.meet or uuid.uuid4().hex,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint=machines.meet or "localhost:0",
            rdzv_configs={"last_call_timeout": LAST_CALL},
            local_addr="localhost" if machines.here else None,
            max_restarts=restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "tutti.launch.worker", *worker_args)
        except ChildFailedError as e:
            codes = {rank: failure.exitcode for rank, failure in e.failures.items()}
            errors = _errors(Path(logs))
            ranks = max((error["ranks"] for error in errors.values()), default=processes)  # of all machines
            raise failure(codes, errors, ranks) from None
        except RendezvousConnectionError as e:
            if not machines.meet:
                raise
            raise LaunchError(
                f"the connection to {machines.meet}, where the machines meet, was lost: that machine ended or cannot "
                "be reached. Start the job again on all machines: training goes on from its last checkpoint",
                rank=-1,
                plain=True,
            ) from e
        except SignalException as e:
            raise Interrupted(e.sigval) from None


def _errors(logs: Path) -> dict[int, dict[str, Any]]:
    """The error that each local rank recorded in its last attempt: {type, text, frame, time_ns, py_callstack}."""
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    files = attempts[-1].glob("*/error.json") if attempts else ()
    errors = [json.loads(path.read_text())["message"]["extraInfo"] for path in files]
    return {error["rank"]: error for error in errors}


def failure(codes: dict[int, int], errors: dict[int, dict[str, Any]], world_size: int) -> LaunchError:
    """The error of a job, from exit codes and recorded errors of its ranks."""
    ranks = sorted(codes.keys() | errors.keys())
    cause = min((Failure(r, codes.get(r, 1), errors.get(r)) for r in ranks), key=lambda f: f.order)
    error = cause.error or {}
    code = cause.exit_code if cause.exit_code > 0 else 128 - cause.exit_code
    kind, trace, plain = error.get("type", ""), error.get("py_callstack", ""), error.get("plain", False)
    message = error["text"] if plain else cause.describe(world_size)
    return LaunchError(message, cause.rank, kind, trace, plain, code)


@contextmanager
def _environment(
    processes: int, machines: Machines, hang: float | None, grace: int, logs: Path | None
) -> Iterator[None]:
    """Set the environment variables of the processes. Variables that the user set are kept."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores() // processes)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # restarts over Gloo fail when the agents' store is shared
    }
    if machines.here and "lo" in [name for _, name in socket.if_nameindex()]:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here; host names need not resolve
    if hang is not None:
        defaults[HANG_VARIABLE] = str(hang)
    if grace != GRACE:
        defaults["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace)
    if logs is not None:
        defaults[LOGS_VARIABLE] = str(logs)
    added = {k: v for k, v in defaults.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore the signal handlers that TorchElastic replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [s for s in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, s)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence TorchElastic's own report of a failure: ours replaces it."""
    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
