"""The position in a streaming source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tutti.data.loader import permute
from tutti.data.order import key
from tutti.data.rows import BadRow
from tutti.data.sources.source import StreamingSource

Row = tuple[dict[str, Any], int, int]  # a row, its shard, and its place there


class Cursor:
    """Reads a streaming source from any saved position: shard after shard, epoch after epoch.

    Shuffling permutes the shards, by epoch, and the rows within windows of `window` rows. A position is the place of
    the window's first row and the number of its rows that were taken; resuming reads the window again.

    seed: numbers that the order depends on.
    bad: called with each BadRow; it may raise.
    epochs: nothing is read after so many; None: go on.
    """

    def __init__(self, source: StreamingSource, seed: tuple[int, ...], shuffle: str | None, window: int, bad: Any,
                 epochs: int | None = None):  # fmt: skip
        if source.shards < 1:
            raise ValueError("a streaming source without shards has no rows")
        self.source, self.seed, self.shuffle, self.window, self.bad = source, seed, shuffle, window, bad
        self.epochs = epochs
        self.load({"epoch": 0, "shard": 0, "row": 0, "number": 0, "taken": 0})

    def load(self, state: dict[str, int]) -> None:
        self._at = dict(state)  # of the window
        self._next = {**state, "taken": 0}  # of the window after
        self._taken = state["taken"]
        self._rows: list[Row] | None = None
        self._open: Iterator[Any] | None = None
        self._shard = 0  # the one that is open

    def state(self) -> dict[str, int]:
        return {**self._at, "taken": self._taken}

    @property
    def epoch(self) -> int:
        """The epoch of the next row, after the last window of an epoch the one that follows."""
        self._rows_left()
        return self._at["epoch"]

    def next(self) -> Row:
        row = self._rows_left()[self._taken]
        self._taken += 1
        return row

    def _rows_left(self) -> list[Row]:
        """The window that has the next row; it is read if need be. Without rows after the last epoch."""
        if self._rows is None or self._taken >= len(self._rows):
            self._rows = self._advance()
        return self._rows

    def _advance(self) -> list[Row]:
        """The next window that has rows; without rows after the last epoch."""
        if self._rows is not None:
            self._at, self._taken = dict(self._next), 0
        while True:
            if self.epochs is not None and self._at["epoch"] >= self.epochs:
                return []
            rows = self._read()
            if self._taken < len(rows):
                break
            if not rows and self._at["number"] == 0:  # a window without rows ends an epoch
                raise ValueError("a streaming source has no rows that can be read")
            self._at, self._taken = dict(self._next), 0
        if self.shuffle is not None:
            order = permute(np.arange(len(rows)), len(rows), key(*self.seed, self._at["epoch"], 1 + self._at["number"]))
            rows = [rows[i] for i in order]
        return rows

    def _read(self) -> list[Row]:
        """The rows of the window at `_at`; sets `_next`. A window ends with its epoch."""
        at = dict(self._at)
        rows: list[Row] = []
        window = 1 if self.shuffle is None else self.window
        while at["shard"] < self.source.shards and len(rows) < window:
            if self._open is None:
                self._shard = self._shard_at(at["epoch"], at["shard"])
                self._open = self.source.open(self._shard, at["row"])
            for row in self._open:
                if isinstance(row, BadRow):
                    self.bad(row)
                else:
                    rows.append((row, self._shard, at["row"]))
                at["row"] += 1
                if len(rows) == window:
                    break
            else:
                at |= {"shard": at["shard"] + 1, "row": 0}
                self._open = None
        if at["shard"] >= self.source.shards and len(rows) < window:
            self._next = {"epoch": at["epoch"] + 1, "shard": 0, "row": 0, "number": 0, "taken": 0}
        else:
            self._next = {**at, "number": at["number"] + 1, "taken": 0}
        return rows

    def _shard_at(self, epoch: int, place: int) -> int:
        if self.shuffle is None:
            return place
        return int(permute(np.array([place]), self.source.shards, key(*self.seed, epoch, 0))[0])
