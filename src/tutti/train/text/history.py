"""The measurements of each step: a line in `history.jsonl`, and TensorBoard logs."""

import json
from pathlib import Path
from types import TracebackType
from typing import IO

from tutti.observe.board import Board
from tutti.observe.phases import append, named
from tutti.train.values import NamedValues
from tutti.whole_files import write_text

Lines = list[NamedValues]
_NAME = "history.jsonl"


class History:
    """Appends to the history of a run that resumes after `step`. Later lines are dropped.

    A line is `{"step": 12, "loss": 3.25, ...}`; `step` counts completed steps. Floats are written to read back exactly.
    Every line is flushed at once, so a killed run loses none. Without `write`, as on all ranks but the first, nothing
    is written.
    """

    def __init__(self, folder: Path, step: int, write: bool = True):
        self._file: IO[str] | None = None
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            lines = [line for line in read(folder) if line["step"] <= step] if step else []
            write_text(folder / _NAME, "".join(json.dumps(line) + "\n" for line in lines), durable=True)
            self._file = open(folder / _NAME, "a", buffering=1)  # noqa: SIM115
            self._board = Board(folder / "tensorboard", step)

    def add(self, step: int, **values: float) -> None:
        if self._file is not None:
            append(self._file, json.dumps({"step": step, **values}) + "\n")
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> "History":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._board.close()
            with named(self._file):
                self._file.close()


def read(folder: Path) -> Lines:
    """All lines of a run so far, except one truncated by a crash."""
    path, lines = folder / _NAME, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def series(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """The steps at which `name` was measured, and the values."""
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in points], [value for _, value in points]
