"""CAD to voxels: voxels per second and errors of volumes, against trimesh.

    python benchmarks/cad.py [--quick]

A ball of 40,000 triangles in grids of several sizes, and a plate with 24 holes in 81 x 161 x 41 cells. trimesh
voxelizes the surface and fills it (`voxelized(pitch).fill()`): cells are in or out. Ours are fill fractions, with 2 x 2
rays a cell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import trimesh

import harness
from tutti.science.em.cad import Mesh, Solid, box, cylinder, fill, sphere

BALL = 4 / 3 * math.pi * 0.4**3


def seconds(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    times, output = [], None
    for _ in range(rounds):
        begin = time.perf_counter()
        output = work()
        times.append(time.perf_counter() - begin)
    return min(times), output


def ball(n: int, rounds: int) -> dict[str, float]:
    solid, edges = sphere((0.5, 0.5, 0.5), 0.4, segments=100), np.linspace(0, 1, n + 1)
    took, filled = seconds(lambda: fill(solid, edges, edges, edges), rounds)
    error = filled.double().sum().item() / n**3 / BALL - 1
    return {"Mvoxels_per_s": n**3 / took / 1e6, "volume_error": error, "h_over_radius": 1 / n / 0.4}


def plate() -> tuple[Solid, Mesh, float]:
    """With holes, as ours and as one mesh for trimesh (a lattice of prisms has no Boolean engine to need)."""
    solid: Solid = box((0, 0, 0), (0.081, 0.161, 0.041))
    for i in range(4):
        for j in range(6):
            solid = solid - cylinder((0.01 + 0.02 * i, 0.013 + 0.027 * j, -0.01), 0.006, 0.061)
    volume = 0.081 * 0.161 * 0.041 - 24 * math.pi * 0.006**2 * 0.041
    return solid, sphere((0.04, 0.08, 0.02), 0.02, segments=60), volume


def run(quick: bool) -> dict[str, Any]:
    rounds = 2 if quick else 5
    balls = {}
    for n in (64, 128) if quick else (100, 200, 400):
        balls[f"{n}^3"] = figures = ball(n, rounds)
        harness.say(f"ball in {n}^3 cells: {figures}")
    solid, part, volume = plate()
    edges = [np.linspace(0, n * 1e-3, n + 1) for n in (81, 161, 41)]
    cells = 81 * 161 * 41
    holes, filled = seconds(lambda: fill(solid, *edges), rounds)
    mesh = trimesh.Trimesh(part.vertices, part.faces)
    ours, theirs, errors = [], [], {}
    for _ in range(2 if quick else 3):
        took, filling = seconds(lambda: fill(part, *edges), 1)
        ours.append(took)
        errors["tutti"] = filling.double().sum().item() * 1e-9 / part.volume() - 1
        took, filling = seconds(lambda: mesh.voxelized(1e-3).fill(), 1)
        theirs.append(took)
        errors["trimesh"] = filling.volume / mesh.volume - 1
    return {
        "balls": balls,
        "plate": {"Mvoxels_per_s": cells / holes / 1e6,
                  "volume_error": filled.double().sum().item() * 1e-9 / volume - 1},
        "ball of 20 cells": {"seconds": {"tutti": min(ours), "trimesh": min(theirs)},
                             "times_trimesh": min(theirs) / min(ours), "volume_errors": errors},
    }  # fmt: skip


if __name__ == "__main__":
    harness.main(run, __file__, packages=("trimesh",))
