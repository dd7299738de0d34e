"""Runs a Python program apart, for `tutti.align.rewards.sandbox`: `python -I isolated.py`. It imports the standard
library.

It reads {"code", "tests", "limits"} as JSON from its input and writes {"outcomes", "output", "isolated"} to its output.
It never runs the given code itself: a child with few rights does, which it ends with all that the child has begun.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

NOBODY = 65534
NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000  # user, net, pid, ipc, mounts
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MOUNT_SETATTR, WHOLE_TREE, READ_ONLY = 442, 0x8000, 1


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    limits = request["limits"]
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    leave_root(libc)
    isolated = bool(libc) and limits["namespaces"] and enter_namespaces(libc, limits["files_bytes"])
    if limits["namespaces"] and not isolated and os.geteuid() == 0:
        sys.exit("without user namespaces, code would run with root's rights, as Python lies where root alone reads")
    if libc:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    output, pipe = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output[1], 1)
            os.dup2(output[1], 2)
            give_up_rights(libc, limits, isolated)
            run(request["code"], request["tests"], pipe[1], {*pipe, *output} - {pipe[1]})
        finally:
            os._exit(1)
    os.close(output[1])
    os.close(pipe[1])
    written, outcomes, status = watch(child, output[0], pipe[0], limits)
    ended = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The first process of a namespace gets no SIGXCPU, and is killed a second later.
    late = ended == signal.SIGKILL and spent.ru_utime + spent.ru_stime > limits["cpu_seconds"]
    end = "timeout" if status is None or ended == signal.SIGXCPU or late else "error"
    kinds = [x for x in outcomes.decode(errors="replace").split("\n") if x in ("passed", "failed", "memory", "error")]
    kinds += [end] * (max(1, len(request["tests"])) - len(kinds))
    answer = {"outcomes": kinds[: max(1, len(request["tests"]))], "output": written.decode(errors="replace"),
              "isolated": isolated}  # fmt: skip
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def leave_root(libc) -> None:
    """Become another user. Where Python lies in a folder that root alone may read, the effective user stays."""
    if os.geteuid() != 0:
        return
    os.chown(".", NOBODY, NOBODY)
    readable, path = True, os.path.dirname(os.path.realpath(os.__file__))
    while readable and path != "/":
        readable, path = bool(os.stat(path).st_mode & 0o001), os.path.dirname(path)
    effective = NOBODY if readable else 0
    os.setgroups([])
    os.setresgid(NOBODY, effective, effective)
    os.setresuid(NOBODY, effective, effective)
    if libc:
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that the maps of a namespace may be written


def enter_namespaces(libc, size: int) -> bool:
    """Own namespaces: no network, no processes but its own, and all files read-only but a folder in memory."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(NAMESPACES):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    here = os.getcwd()
    if libc.syscall(MOUNT_SETATTR, -1, b"/", WHOLE_TREE, attributes, ctypes.sizeof(attributes)):
        raise OSError(ctypes.get_errno(), "mount_setattr")
    for place in (here, "/run"):
        if libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, f"size={size},nr_inodes=4096".encode()):
            raise OSError(ctypes.get_errno(), f"mount on {place}")
    os.chdir(here)
    return True


def give_up_rights(libc, limits, isolated: bool) -> None:
    """Restrict the process that runs the code, and all its children."""
    if libc:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    # Without a namespace, all processes of the user count; then none may be begun.
    processes = limits["processes"] if isolated else 0
    for name, limit in (("CPU", limits["cpu_seconds"]), ("AS", limits["memory_bytes"]), ("CORE", 0),
                        ("FSIZE", limits["file_bytes"]), ("NOFILE", 64), ("NPROC", processes)):  # fmt: skip
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        later = limit + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else limit  # first a signal, then the end
        resource.setrlimit(which, (limit, later))


def run(code: str, tests, pipe: int, closed) -> None:
    """Run the code, and then each test in its names; tell the outcome of each as a line."""
    for x in closed:
        os.close(x)

    def tell(outcome: str) -> None:
        os.write(pipe, f"{outcome}\n".encode())

    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(code, "<completion>", "exec"), names)
    except BaseException as error:
        show(error)
        for _ in tests or [""]:
            tell("memory" if isinstance(error, MemoryError) else "error")
        os._exit(0)
    for test in tests or [""]:
        try:
            exec(compile(test, "<test>", "exec"), names)
        except BaseException as error:
            show(error)
            failed = "failed" if isinstance(error, AssertionError) else "error"
            tell("memory" if isinstance(error, MemoryError) else failed)
        else:
            tell("passed")
    show()
    os._exit(0)


def show(error=None) -> None:
    """Print what is left to print, and an error."""
    try:
        sys.stdout.flush()
        if error is not None:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    except BaseException:  # output is not worth an outcome
        return


def watch(child: int, output: int, pipe: int, limits):
    """Watch a child: the beginning of its output, its report, and its exit status, which is None after a timeout."""
    written, outcomes, status = b"", b"", None
    deadline, live = time.monotonic() + limits["seconds"], {output, pipe}
    while time.monotonic() < deadline:
        ready, _, _ = select.select(list(live), [], [], 0.01)
        for x in ready:
            part = os.read(x, 65536)
            if not part:
                live.discard(x)
            elif x == output:
                written += part[: max(0, limits["output_bytes"] - len(written))]
            else:
                outcomes += part[: max(0, 65536 - len(outcomes))]
        if not ready or not live:
            done, ended = os.waitpid(child, os.WNOHANG)
            if done:
                status = ended
                break
            if not live:
                time.sleep(0.01)
    if status is None:
        done, ended = os.waitpid(child, os.WNOHANG)
        status = ended if done else None
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    end_orphans()
    return written, outcomes, status


def end_orphans() -> None:
    """End processes that the child has left behind, which are now children of this one."""
    place = f"/proc/self/task/{os.getpid()}/children"
    for _ in range(1000):
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            with open(place) as file:
                left = file.read().split()
        except OSError:  # there is none, or the system does not tell
            return
        for x in left:
            os.kill(int(x), signal.SIGKILL)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
