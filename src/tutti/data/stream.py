"""Batches of samples in an order that any number of readers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tutti.data.ahead import Ahead
from tutti.data.cursor import Cursor
from tutti.data.digest import digest
from tutti.data.mixture import Mixture
from tutti.data.order import Order
from tutti.data.rows import SAMPLE, BadRow, bad_row, name_of
from tutti.data.sources.source import MappedStream, StreamingSource

MEGABYTE = 2**20
WINDOW = 1000
MOST_ERRORS = 1000  # errors of bad rows
REPLACED = 100  # rows after a bad one that are tried in its place


class _Item(NamedTuple):
    """A sample: row `place` of source `source`, or, of a streaming source, the row itself from there in a shard."""

    sample: int
    source: int
    place: int = 0
    row: dict[str, Any] | None = None
    shard: int = 0


@dataclass(frozen=True)
class _Unit:
    """A batch to make: the items, those of this part among them, and the stream's state after it."""

    items: tuple[_Item, ...]
    first: int
    stop: int
    state: dict[str, Any]
    bad: tuple[str, ...]


class Stream:
    """An endless iterator over batches of samples; its state is the number of samples consumed.

    source: a source or whatever `open_source` takes, or a `Mixture`.
    batch: samples of a global batch, of all parts together.
    seed: the seed of the order.
    part, parts: this reader's part: rows [batch * part // parts, batch * (part + 1) // parts) of each global batch.
        The global order does not depend on the number of parts, so a stream resumes with another number.
    shuffle: "rows"; "blocks" for sources that are read in blocks (`Order`); or None.
    epochs: end after so many epochs, the last batch being smaller; None: go on with the next epoch. A mixture has no
        epochs.
    transform: row -> feature, called for the rows of this part only.
    collate: list of features -> batch; None: batches are lists.
    on_bad: "raise", or "skip": a row that cannot be read or transformed is replaced by the one after it in its source
        (of a streaming source, in its batch), counted in `bad_rows`, and its error kept in `bad` (the first 1000).
        Both count what this object has read; a window that is read again counts again.
    workers: processes that read, transform and collate; 0: a thread.
    ahead: bytes of batches that may wait, in MiB; 0: make each batch when it is requested.
    window: rows of a streaming source that are shuffled together.

    Each row has the key `sample_index`: its position in the stream, which goes on over epochs. Draws of a task's
    collator are functions of it.

    Rows of sources with random access are read by the part that needs them. A streaming source is scanned by all
    parts, since only its rows say where its shards end; a part transforms only its own rows.

    >>> stream = Stream([{"x": i} for i in range(4)], batch=2, shuffle=None)
    >>> [row["x"] for row in next(stream)]
    [0, 1]
    >>> stream.state_dict()["samples"]
    2
    """

    def __init__(
        self,
        source: Any,
        batch: int,
        seed: int = 0,
        part: int = 0,
        parts: int = 1,
        *,
        shuffle: str | None = "rows",
        epochs: int | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        on_bad: str = "raise",
        workers: int = 0,
        ahead: float = 64,
        window: int = WINDOW,
    ):
        if batch < 1 or window < 1:
            raise ValueError(f"batch is {batch} and window {window}; both must be at least 1")
        if not 0 <= part < parts:
            raise ValueError(f"part is {part} of {parts} parts; it must be in [0, {parts})")
        if parts > batch:
            raise ValueError(f"a batch of {batch} has no rows for some of {parts} parts; make it larger")
        if on_bad not in ("raise", "skip"):
            raise ValueError(f"on_bad is {on_bad!r}; it must be 'raise' or 'skip'")
        if epochs is not None and (epochs < 1 or isinstance(source, Mixture)):
            raise ValueError(f"epochs is {epochs}; it must be at least 1, and a mixture has none")
        self.mixture = source if isinstance(source, Mixture) else Mixture([(source, 1.0)])
        self.batch, self.seed, self.part, self.parts = batch, seed, part, parts
        self.shuffle, self.epochs, self.on_bad, self.window = shuffle, epochs, on_bad, window
        self.workers, self.ahead = workers, int(ahead * MEGABYTE)
        self.samples = 0  # consumed, of all parts together
        self.bad_rows, self.bad = 0, list[str]()
        self._streams: dict[str, dict[str, int]] = {}
        self._ahead: Ahead | None = None
        self._late_errors: list[str] = []  # errors of bad rows of streaming sources, which no unit has yet
        self._orders = [
            None if isinstance(s, StreamingSource)
            else Order(len(s), (seed, 2, i), self._shuffle_of(s), getattr(s, "blocks", None))
            for i, s in enumerate(self.mixture.sources)
        ]  # fmt: skip
        functions = tuple(s.function if isinstance(s, MappedStream) else None for s in self.mixture.sources)
        self._make = _Make(self.mixture.sources, functions, transform, collate, on_bad)

    def _shuffle_of(self, source: Any) -> str | None:
        """In a mixture, "blocks" is for the sources that have them."""
        lone = len(self.mixture.sources) == 1
        has = getattr(source, "blocks", None) is not None
        return "rows" if self.shuffle == "blocks" and not has and not lone else self.shuffle

    # -- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        if self._ahead is None:
            self._late_errors = []
            self._ahead = Ahead(self._units(self._late_errors), self._make, self.ahead, self.workers)
        try:
            batch, bad = next(self._ahead)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                self._report(self._late_errors)  # after the last batch
            raise
        unit: Any = self._ahead.unit
        self.samples, self._streams = unit.state["samples"], unit.state["streams"]
        self._report([*unit.bad, *bad])
        return batch

    def _report(self, errors: list[str]) -> None:
        self.bad_rows += len(errors)
        self.bad += errors[: MOST_ERRORS - len(self.bad)]

    def __len__(self) -> int:
        """Batches of all epochs, of sources with random access. Raises TypeError where they are not known."""
        if self.epochs is None or self._orders[0] is None:
            raise TypeError("the stream has no length: it is endless, or its source is streamed")
        return -(-self.epochs * len(self.mixture.sources[0]) // self.batch)

    def _units(self, errors: list[str]) -> Iterator[_Unit]:
        """The batches from the present state on. errors: keeps errors of bad rows after the last batch."""
        cursors = self._cursors(errors)
        at = self.samples
        while True:
            items = self._items(at, cursors)
            if not items:
                return
            count = len(items)
            first, stop = (count * p // self.parts for p in (self.part, self.part + 1))
            if not cursors:
                items, first, stop = items[first:stop], 0, stop - first
            at += count
            state = {"samples": at, "streams": {str(i): c.state() for i, c in cursors.items()}}
            yield _Unit(tuple(items), first, stop, state, tuple(errors))
            errors.clear()

    def _items(self, at: int, cursors: dict[int, Cursor]) -> list[_Item]:
        """The samples of the global batch that begins at `at`; fewer at the end of the last epoch."""
        samples = np.arange(at, at + self.batch)
        if self.epochs is not None and not cursors:
            samples = samples[samples < self.epochs * len(self.mixture.sources[0])]
        numbers, turns = self.mixture.places(self.seed, samples)
        rows = np.zeros(len(samples), np.int64)
        for source, order in enumerate(self._orders):
            here = numbers == source
            if order is not None and here.any():
                rows[here] = order.rows(turns[here])
        items = []
        for sample, source, row in zip(samples.tolist(), numbers.tolist(), rows.tolist(), strict=True):
            if source in cursors:
                if self.epochs is not None and cursors[source].epoch >= self.epochs:
                    break
                content, shard, place = cursors[source].next()
                items.append(_Item(sample, source, place, content, shard))
            else:
                items.append(_Item(sample, source, row))
        return items

    def _cursors(self, errors: list[str]) -> dict[int, Cursor]:
        def bad(error: BadRow) -> None:
            if self.on_bad == "raise":
                raise error
            errors.append(str(error))

        cursors = {
            i: Cursor(s.source if isinstance(s, MappedStream) else s, (self.seed, 2, i), self.shuffle, self.window, bad,
                      self.epochs)
            for i, s in enumerate(self.mixture.sources)
            if isinstance(s, StreamingSource)
        }  # fmt: skip
        for i, cursor in cursors.items():
            if str(i) in self._streams:
                cursor.load(self._streams[str(i)])
        return cursors

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was returned, the same on all parts; it can be saved as JSON."""
        state = {"samples": self.samples, "seed": self.seed, "sources": self._sources(), "content": self._content}
        return state | {"streams": self._streams}

    @cached_property
    def _content(self) -> list[str]:
        """A digest of some rows of each source."""
        return [digest(source) for source in self.mixture.sources]

    def _sources(self) -> list[list[int]]:
        """Rows (or shards, of a streaming source) and share in 10,000 samples of each source."""
        sizes = [s.shards if isinstance(s, StreamingSource) else len(s) for s in self.mixture.sources]
        return [[size, int(share)] for size, share in zip(sizes, self.mixture.counts, strict=True)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch of a `state_dict`, with any number of parts and any batch size.

        Raises ValueError if the state is of another seed or other sources, or if some rows of the sources have changed.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of a stream with seed {state['seed']}, this one has {self.seed}")
        if [list(source) for source in state["sources"]] != self._sources():
            raise ValueError(
                f"the state is of a stream over other sources: {state['sources']} (rows or shards, and share in "
                f"10,000), these are {self._sources()}; open those it was saved with"
            )
        for i, (before, now) in enumerate(zip(state.get("content", self._content), self._content, strict=True)):
            if before != now:
                raise ValueError(f"rows of source {i} are not those that the state was saved with, though they are as "
                                 "many: open the file as it was, or begin anew")  # fmt: skip
        self.close()
        self.samples, self._streams = state["samples"], dict(state["streams"])

    def close(self) -> None:
        """End workers and drop what was read ahead. The stream can go on afterwards."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Make:
    """Makes the batch of a unit: (batch, errors of bad rows)."""

    sources: tuple[Any, ...]
    functions: tuple[Callable[[dict[str, Any]], dict[str, Any]] | None, ...]
    transform: Callable[[dict[str, Any]], Any] | None
    collate: Callable[[list[Any]], Any] | None
    on_bad: str

    def __call__(self, unit: _Unit) -> tuple[Any, list[str]]:
        bad: list[str] = []
        features = [self.feature(unit, i, bad) for i in range(unit.first, unit.stop)]
        return features if self.collate is None else self.collate(features), bad

    def feature(self, unit: _Unit, i: int, bad: list[str]) -> Any:
        """The feature of item `i`, or, if it is bad and such are skipped, of the row after it."""
        item = unit.items[i]
        count = len(unit.items) if item.row is not None else len(self.sources[item.source])
        last: Exception | None = None
        tried = 0
        for more in range(min(count, REPLACED)):
            read = item  # in its place
            try:
                if item.row is None:
                    read = item._replace(place=(item.place + more) % count)
                    row = self.sources[item.source][read.place]
                else:
                    read = unit.items[(i + more) % count]
                    if read.row is None:
                        continue
                    row = read.row
                tried += 1
                try:
                    for function in (self.functions[item.source], self.transform):
                        if function is not None:
                            row = function({**row, SAMPLE: item.sample})
                except Exception as error:
                    raise bad_row(self.name(read), error) from error
                return {**row, SAMPLE: item.sample} if isinstance(row, dict) else row
            except BadRow as error:
                last = error
            except Exception as error:
                last = bad_row(self.name(read), error)
                last.__cause__ = error
            if self.on_bad == "raise":
                raise last
            bad.append(str(last))
        raise ValueError(f"{tried} rows were tried in place of one, and all are bad; the last: {last}")

    def name(self, item: _Item) -> str:
        """The name of a row in errors."""
        source = self.sources[item.source]
        return name_of(source, item.place) if item.row is None else source.name(item.shard, item.place)
