"""Solver runs on disk: one file per sample in a folder, so that an interrupted collection resumes."""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tutti.checkpoint.array_file import read_arrays, write_arrays
from tutti.launch.progress import progress
from tutti.science.em.bounds import check_whole
from tutti.science.em.shown import Brief
from tutti.science.em.surrogate.geometry import Geometry, check_s

GUARD = (
    "collect(processes=...) in a script needs `if __name__ == '__main__':` around it: its processes import the script"
)


@dataclass(frozen=True, repr=False)
class Samples(Brief):
    """points: float64 (n, parameters). s: complex128 (n, traces, frequencies). seconds: time of each solver run
    (n,)."""

    points: Tensor
    s: Tensor
    seconds: Tensor

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, rows: slice | Tensor) -> Samples:
        return Samples(self.points[rows], self.s[rows], self.seconds[rows])

    def __add__(self, other: Samples) -> Samples:
        return Samples(torch.cat([self.points, other.points]), torch.cat([self.s, other.s]),
                       torch.cat([self.seconds, other.seconds]))  # fmt: skip

    def check(self, geometry: Geometry, least: int = 1) -> None:
        """Raises ValueError for shapes that are not the geometry's, values that are not finite, and too few rows."""
        x = geometry.space.points(self.points)
        geometry.space.check(x)
        check_s(self.s, (len(x), *geometry.shape), f"samples of {geometry.name}")
        if len(x) < least:
            raise ValueError(f"{len(x)} samples of {geometry.name} are too few: at least {least}")


def collect(geometry: Geometry, points: Tensor, folder: str | Path | None = None, processes: int = 1) -> Samples:
    """Solve points, reading from `folder` those that it has and writing the others there as they are done.

    Files are found by the geometry's names, traces and frequencies, and the point: a solver that changes needs another
    `name`. processes: how many solve at once; with several, `geometry.solve` is a function of a module, and a script
    needs `if __name__ == "__main__":` around its calls, as the processes import it.
    Raises ValueError for points out of range, for a file of another geometry and for a solver that other processes
    cannot find, and RuntimeError for a script without the guard and for a process that dies.
    """
    check_whole("a collection", processes=processes)
    points = geometry.space.points(points)
    geometry.space.check(points)
    files = [Path(folder, f"{key(geometry, x)}.npz") if folder is not None else None for x in points]
    rows: list[tuple[Tensor, float] | None] = [read(geometry, x, file) for x, file in zip(points, files, strict=True)]
    missing = [i for i, row in enumerate(rows) if row is None]
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with progress(f"solving {geometry.name}") as tell:
        for done, (i, row) in enumerate(solved(geometry, points, missing, processes)):
            rows[i] = row
            write(points[i], row, files[i])
            tell.count(done + 1, len(missing))
    solved_rows = [row for row in rows if row is not None]
    none = torch.zeros(0, *geometry.shape, dtype=torch.complex128)
    return Samples(points, torch.stack([s for s, _ in solved_rows]) if solved_rows else none,
                   torch.tensor([t for _, t in solved_rows], dtype=torch.float64))  # fmt: skip


def timed(geometry: Geometry, point: Tensor) -> tuple[Tensor, float]:
    begin = time.perf_counter()
    s = geometry.solved(point)
    return s, time.perf_counter() - begin


def check_processes(geometry: Geometry) -> None:
    """Raises RuntimeError in a process that imports the script, ValueError for a solver that cannot be pickled."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(GUARD)
    try:
        pickle.dumps(geometry.solve)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"solve must be a function of a module to run in other processes: {error}") from error


def solved(geometry: Geometry, points: Tensor, rows: list[int], processes: int) -> Iterator[tuple[int, tuple]]:
    """(row, (s, seconds)) of each row, as they are done."""
    if processes <= 1 or len(rows) < 2:
        for i in rows:
            yield i, timed(geometry, points[i])
        return
    check_processes(geometry)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        cause = GUARD
        try:
            pool.submit(abs, 0).result()  # a pool that breaks with samples in its pipe may hang
            cause = "it ran out of memory, or cannot import the solver"
            futures = {pool.submit(timed, geometry, points[i]): i for i in rows}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(f"a process that solves {geometry.name} died: {cause}") from error
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, do not solve the rest


def key(geometry: Geometry, point: Tensor) -> str:
    identity = (
        f"{geometry.name} {geometry.space.names} {geometry.traces} {geometry.frequencies.tolist()} {point.tolist()}"
    )
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def read(geometry: Geometry, point: Tensor, file: Path | None) -> tuple[Tensor, float] | None:
    if file is None or not file.exists():
        return None
    x, s, seconds = map(torch.from_numpy, read_arrays(file, "point", "s", "seconds").values())
    if not torch.equal(x, point):
        raise ValueError(f"{file} is a sample of another point, {geometry.space.describe(x)}")
    return check_s(s, geometry.shape, str(file)), float(seconds)


def write(point: Tensor, row: tuple[Tensor, float], file: Path | None) -> None:
    if file is not None:
        write_arrays(file, point=point.numpy(), s=row[0].numpy(), seconds=np.float64(row[1]))
