"""Phases of a training loop (data, step, saving, ...): the seconds of each, per step and rank, as JSON lines."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class Phases:
    """Writes the phases of one rank to `phases-<rank>.jsonl`. A run that resumes at `step` drops later lines.

    scalar: also called with each number, as (name, value, step).
    """

    def __init__(self, folder: Path, rank: int, step: int = 0, scalar: Callable[[str, float, int], None] | None = None):
        self.scalar = scalar
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"phases-{rank}.jsonl"
        lines = [line for line in _lines(path) if line["step"] <= step] if step else []
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.file = open(path, "a", buffering=1)  # noqa: SIM115
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as this phase of the current step."""
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def end(self, step: int, **more: float) -> None:
        """Write the seconds of each phase of the step that ends, and other numbers."""
        phases = {name: round(seconds, 6) for name, seconds in self.seconds.items()}
        append(self.file, json.dumps({"step": step, "phases": phases, **more}) + "\n")
        self.seconds.clear()
        if self.scalar:
            for name, value in {**{f"seconds/{name}": took for name, took in phases.items()}, **more}.items():
                self.scalar(name, value, step)

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with named(self.file):
            self.file.close()


def append(file: IO[str], line: str) -> None:
    """Write a line to a file. An error has the file's name."""
    with named(file):
        file.write(line)


@contextmanager
def named(file: IO[str]) -> Iterator[None]:
    """Errors of the file system meanwhile have the file's name: `close` tells of a full disk again."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


def read_phases(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The lines of every rank's file."""
    files = {int(path.stem.partition("-")[2]): path for path in folder.glob("phases-*.jsonl")}
    return {rank: _lines(path) for rank, path in sorted(files.items())}


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:  # truncated by a crash
            break
    return lines
