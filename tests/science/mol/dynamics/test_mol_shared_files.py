"""Errors of files of a simulation that processes share end all of them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mol_systems import fluid, lennard_jones

from tutti.science.mol.dynamics import VelocityVerlet
from tutti.science.mol.dynamics.decomposed import DecomposedSimulation
from tutti.science.mol.dynamics.log import Log
from tutti.science.mol.dynamics.restart import Restart, load, save

pytest.importorskip("h5py")


def errors(folder: Path) -> list[str]:
    """What the process says: of a full disk at a restart, a damaged restart, a log that is there, and an explosion."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    system = fluid()
    simulation = DecomposedSimulation(system, lennard_jones(1.2), VelocityVerlet(0.004), skin=0.1).thermalize(1.0)
    path, texts = folder / "a.restart", []
    save(simulation, path)

    def attempt(work) -> None:
        dist.barrier()
        try:
            work()
        except (ValueError, OSError) as error:
            texts.append(str(error))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    attempt(lambda: save(simulation, path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log = Log(folder / "log.csv", 5)
    simulation.run(5, [log]).run(5, [log])
    attempt(lambda: simulation.run(5, [Log(folder / "log.csv", 5)]))
    if dist.get_rank() == 0:
        os.truncate(path, 1000)
    attempt(lambda: load(simulation, path))
    simulation.updater.dt = 0.1
    attempt(lambda: simulation.run(20, [Restart(folder / "b.restart", 10)]))
    return texts


def test_all_processes_end_where_the_first_cannot_write(pool, tmp_path):
    messages = pool.run(errors, tmp_path)
    for texts in messages:
        assert len(texts) == 4
        assert "a.restart cannot be written: " in texts[0]
        assert "log.csv exists, and the simulation is at step 10: pass resume=True" in texts[1]
        assert "a.restart is no restart file of a simulation, or damaged" in texts[2]
        assert "shorter time step" in texts[3]
    assert not (tmp_path / "b.restart").exists()
