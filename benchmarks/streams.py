"""Rows a second of a shuffled stream of JSON Lines, beside a loop of plain Python over the same file.

The file has 100,000 rows of 500 bytes. The loop reads it in order and parses each line. The stream shuffles: the
compressed file within windows of 1,000 rows, the plain file whole, each row read at its place. It runs in one thread
(`ahead=0`) and returns lists of 100 rows.

- `rows_per_cpu_second`: medians over turns, counted in CPU time.
- `ratio`: the loop's over the stream's.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from tutti.data import Stream

BATCH = 100


class Loop:
    """`rows` a turn, by plain Python."""

    name = "plain Python"

    def __init__(self, path: Path) -> None:
        self.path = path

    def turn(self, steps: int) -> list[float]:
        start = time.process_time()
        with gzip.open(self.path, "rt") if self.path.suffix == ".gz" else open(self.path) as file:
            for _, line in zip(range(steps * BATCH), file, strict=False):
                json.loads(line)
        return [time.process_time() - start]

    def close(self) -> None:
        pass


class Ours:
    name = "Stream"

    def __init__(self, path: Path) -> None:
        self.stream = Stream(path, BATCH, ahead=0)

    def turn(self, steps: int) -> list[float]:
        start = time.process_time()
        for _ in range(steps):
            next(self.stream)
        return [time.process_time() - start]

    def close(self) -> None:
        self.stream.close()


def measured(path: Path, steps: int) -> dict[str, Any]:
    times = harness.take_turns([Loop(path), Ours(path)], rounds=9, steps=steps, warmup=steps)
    rows = {name: steps * BATCH / harness.summary(rounds)["median"] for name, rounds in times.items()}
    return {"rows_per_cpu_second": rows, "ratio": rows[Loop.name] / rows[Ours.name]}


def run(quick: bool) -> dict[str, Any]:
    steps = 20 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with open(path, "w") as file:
            file.writelines(json.dumps({"text": "word " * 95, "n": i}) + "\n" for i in range(100_000))
        packed = path.with_suffix(".jsonl.gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), 6))
        return {"jsonl.gz": measured(packed, steps), "jsonl": measured(path, steps)}


if __name__ == "__main__":
    harness.main(run, __file__)
