import os
import signal
import subprocess
import sys
import time

import pytest

from cases import slow
from tutti.launch.launch import Failure, LaunchError, Machines, launch

SCRIPT = r"""
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, what = dist.get_rank(), sys.argv[1]
def work():
    if rank == 1 and what == "raise":
        raise ValueError("row 7 is odd")
    if rank == 1 and what == "kill":
        os.kill(os.getpid(), 9)
    if rank == 1 and what == "exit":
        os._exit(7)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    threads = torch.get_num_threads()
    sys.stdout.write(f"rank {rank} of {dist.get_world_size()} sum {total.item()} threads {threads}\n")
work()
"""

WAIT = """
import signal, os
print(os.environ["RANK"], flush=True)
signal.pause()
"""


@pytest.fixture
def command(tmp_path):
    """`tutti run -n 2` of a script given as text."""

    def make(text, *args, n=2):
        script = tmp_path / "script.py"
        script.write_text(text)
        return [sys.executable, "-m", "tutti.cli", "run", "-n", str(n), str(script), *args]

    return make


@pytest.mark.starts
def test_a_script_runs_in_every_process_with_its_share_of_the_cores(command):
    done = subprocess.run(command(SCRIPT, "go", n=2), capture_output=True, text=True)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 2 sum 1 threads {threads}" for r in range(2)]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        (
            "raise",
            1,
            "tutti run: rank 1 of 2 failed: ValueError: row 7 is odd\n  {script}:7 in work: raise ValueError",
        ),
        slow(
            "kill",
            137,
            "tutti run: rank 1 of 2 was killed by SIGKILL (signal 9; out of memory is the usual reason)",
        ),
        slow("exit", 7, "tutti run: rank 1 of 2 exited with code 7"),
    ],
)
@pytest.mark.starts
def test_a_rank_that_fails_takes_the_job_down_with_one_message(command, tmp_path, what, code, message):
    done = subprocess.run(command(SCRIPT, what), capture_output=True, text=True)
    assert done.returncode == code
    assert message.format(script=tmp_path / "script.py") in done.stderr
    assert done.stderr.count("tutti run:") == 1
    assert "rank 0" not in done.stderr and "elastic" not in done.stderr


@pytest.mark.starts
@pytest.mark.slow
def test_interrupting_the_launcher_stops_every_rank(command):
    with subprocess.Popen(command(WAIT), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert {job.stdout.readline(), job.stdout.readline()} == {"0\n", "1\n"}
        job.send_signal(signal.SIGINT)
        out, err = job.communicate()
    assert job.returncode == 130
    assert out == "" and err == "tutti run: stopped by SIGINT\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.starts
def test_the_ranks_do_not_outlive_a_killed_launcher(command):
    with subprocess.Popen(command(WAIT), stdout=subprocess.PIPE, text=True) as job:
        assert {job.stdout.readline(), job.stdout.readline()} == {"0\n", "1\n"}
        job.kill()
        assert job.stdout.read() == ""  # end of file: nobody holds the pipe any more


@pytest.mark.starts
def test_launch_returns_the_results_in_rank_order():
    assert launch(os.getenv, 2, "RANK") == ["0", "1"]
    assert "RANK" not in os.environ


@pytest.mark.starts
@pytest.mark.slow
def test_launch_raises_with_the_rank_and_its_error():
    with pytest.raises(LaunchError, match=r"of 2 failed: ValueError: invalid literal for int\(\) .*'x'") as caught:
        launch(int, 2, "x")
    assert caught.value.kind == "ValueError" and caught.value.rank in (0, 1)


def test_launch_refuses_what_it_cannot_run():
    def local():
        pass

    local.__module__ = "__main__"
    with pytest.raises(ValueError, match=r"cannot import .*local.* from __main__"):
        launch(local, 2)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        launch(os.getenv, 0, "RANK")


def test_the_cause_is_told_from_its_consequences():
    def error(text, time_ns):
        return {"type": "RuntimeError", "text": text, "time_ns": time_ns, "frame": ""}

    lost = error("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer", 1)
    stopped, killed = Failure(0, -signal.SIGTERM, None), Failure(1, -signal.SIGKILL, None)
    late, early, follower = Failure(2, 1, error("b", 9)), Failure(3, 1, error("a", 5)), Failure(4, 1, lost)
    ranked = sorted([follower, stopped, late, early, killed], key=lambda f: f.order)
    assert [f.rank for f in ranked] == [1, 3, 2, 0, 4]


def dies_at_first(folder: str) -> str:
    """Rank 1 is killed when it is started first, and fails when it is started again."""
    count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if rank == "1" and count == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "1" and count == "1":
        raise ValueError("the second time")
    return count


@pytest.mark.slow
def test_a_job_starts_anew_as_often_as_it_may(tmp_path, capfd):
    assert launch(dies_at_first, 2, str(tmp_path), restarts=2) == ["2", "2"]
    said = capfd.readouterr().err
    assert "restart 1 of 2, in 2 processes" in said and "restart 2 of 2" in said
    with pytest.raises(LaunchError, match=r"rank 1 of 2 failed: ValueError: the second time"):
        launch(dies_at_first, 2, str(tmp_path), restarts=1)


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 1), "--min 0 and --max 1: give"), ((3, 2), "--min 3 and --max 2: give"),
    ((1, 2), "several machines need a meeting point"), ((1, 2, "here"), "several machines need a meeting point"),
])  # fmt: skip
def test_machines_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Machines(*arguments)


STORE = """
import torch.distributed as dist, time
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_lost_meeting_place_is_an_error_with_its_remedy(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WAIT)
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as store:
        meet = f"localhost:{int(store.stdout.readline())}"
        machine = subprocess.Popen(
            [sys.executable, "-m", "tutti.cli", "run", "--min", "2", "--max", "2", "--meet", meet, str(script)],
            stderr=subprocess.PIPE, text=True)  # fmt: skip
        time.sleep(6)  # it waits for the second machine
        store.kill()
    _, said = machine.communicate(timeout=60)
    assert machine.returncode == 1
    assert f"tutti run: the connection to {meet}, where the machines meet, was lost" in said
    assert "Traceback" not in said
