from pathlib import Path

import pytest
import torch

from tutti.hardware import machine


def test_memory_is_that_of_the_machine():
    assert 2**28 < machine.memory(torch.device("cpu")) < 2**50


def test_cores_are_divided(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert [machine.threads_of(n) for n in (1, 3, 8, 20)] == [8, 2, 1, 1]
    assert machine.threads_of(3, 5) == 5 and machine.devices("cpu") == 8
    with pytest.raises(ValueError, match="a process needs at least 1 thread, not 0"):
        machine.threads_of(2, 0)


@pytest.mark.parametrize(
    ("processes", "cores", "parts"),
    [(2, 2, [[0], [1]]), (3, 8, [[0, 1], [2, 3], [4, 5]]), (4, 2, [[0], [0], [1], [1]]), (1, 2, [[0, 1]])],
)
def test_parts_of_the_cores(processes, cores, parts):
    assert [sorted(machine.cores_of(i, processes, range(cores))) for i in range(processes)] == parts


def test_processes_keep_to_their_own_cores(monkeypatch):
    affinities = []
    monkeypatch.setattr(machine, "_allowed", lambda: (4, 5, 6, 7))
    monkeypatch.setattr(machine.os, "sched_setaffinity", lambda process, cores: affinities.append(cores), raising=False)
    assert machine.keep_to_own_cores(1, 2, 2) and affinities == [{6, 7}]
    assert not machine.keep_to_own_cores(0, 1, 4), "has all of them"
    assert not machine.keep_to_own_cores(1, 2, 4), "its threads would share them"
    assert machine.cores() == 4 and len(affinities) == 1


def test_a_key_tells_machines_releases_and_jobs_apart(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: "Abacus 2")
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert machine.key("cpu", 4, 2) == f"Abacus 2 | 8 cores | torch {torch.__version__} | 4 processes | 2 threads"
    assert machine.calibration("cpu", 4, 2, Path("here")) == Path("here/cpu-4x2.json")
