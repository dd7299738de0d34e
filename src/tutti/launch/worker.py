"""Runs a script, a module or a function in each process that `tutti.launch.launch` starts.

    python -m tutti.launch.worker script.py ARGS...      python -m tutti.launch.worker -m module ARGS...
    python -m tutti.launch.worker --call PAYLOAD RESULTS

An exception is written to the error file of the TorchElastic protocol with its type, its time in nanoseconds (ranks
that only lost their peer fail milliseconds later) and the last frame in user code. Then the process exits at once:
other ranks would wait for it in a collective.

torch is imported late: the import takes seconds, and a restart is reported before.
"""

import ctypes
import os
import pickle
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from tutti.launch.launch import ORPHANS, Interrupted, log_file, rank, world_size


def _die_with_parent() -> None:
    """Ask Linux to send SIGTERM, or the signal that the launcher chose, when it dies. Does nothing on other systems."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(os.environ.get(ORPHANS, signal.SIGTERM)))
        if os.getppid() == 1 and os.environ.get("TORCHELASTIC_RUN_ID"):  # it is gone already
            os._exit(128 + signal.SIGTERM)


def _call(payload: str, results: str) -> None:
    paths, pickled = pickle.loads(Path(payload).read_bytes())
    sys.path[:] = paths
    function, args = pickle.loads(pickled)
    result = function(*args)
    Path(results, f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(result))


def _execute(argv: list[str]) -> None:
    if argv[0] == "--call":
        return _call(*argv[1:])
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def _print_to_log() -> None:
    """Send what this process and its children print to the log of this rank, if there is one."""
    if path := log_file():
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        print(f"-- {time.ctime()}: rank {rank()} of {world_size()} on {socket.gethostname()}", flush=True)


def _tell_of_restart() -> None:
    count, limit = (int(os.environ.get(f"TORCHELASTIC_{what}", "0")) for what in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count and os.environ.get("RANK") == "0":
        processes = os.environ.get("WORLD_SIZE", "1")
        print(f"restart {count} of {limit}, in {processes} processes", file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
    _die_with_parent()
    _print_to_log()
    _tell_of_restart()

    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    from tutti.launch import watchdog
    from tutti.launch.error_file import ErrorFile
    from tutti.launch.listen import listen_where_named

    listen_where_named()
    code = 0
    try:
        record(_execute, error_handler=ErrorFile())(argv)
        watchdog.done()
        if dist.is_initialized():  # else threads of its store may end the process with an error
            dist.destroy_process_group()
    except Interrupted as e:
        code = 128 + e.signal
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except Exception:
        code = 1
        if log_file():  # the launcher prints it elsewhere
            traceback.print_exc()
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
