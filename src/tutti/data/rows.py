"""Rows with random access: what sources, tasks and loops exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

SAMPLE = "sample_index"
"""Key of a row's position in the stream of samples. Random masks are functions of it."""


MOST = 1 << 26  # bytes of a row: what is longer is a file without ends of lines, or one that fills the memory


class BadRow(ValueError):
    """A row that cannot be read or decoded. The message names the file, the row and a remedy."""


def bad_row(name: str, error: Exception) -> BadRow:
    """The error of a function of a row as one that names the row."""
    if isinstance(error, BadRow):
        return BadRow(f"{name}: {error}")
    return BadRow(f"{name}: {type(error).__name__}: {error}; correct the row, or read with on_bad='skip'")


class Rows:
    """Random access by index. Subclasses define `__len__` and `row`.

    `rows[i]` is `row(i)`, so that a torch DataLoader can read it. Negative indices count from the end.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def row(self, i: int) -> dict[str, Any]:
        """Row `i`, 0 <= i < len."""
        raise NotImplementedError

    def name(self, i: int) -> str:
        """The name of row `i` in errors: `train.jsonl:17`."""
        return f"row {i}"

    def cell(self, i: int, column: str) -> Any:
        """One value of row `i`. Sources that decode override it, to decode no more than this value."""
        return self.row(i)[column]

    def cells(self, column: str, count: int) -> Iterator[Any]:
        """The values of a column in the first `count` rows."""
        return (self.cell(i, column) for i in range(min(count, len(self))))

    def __getitem__(self, i: int) -> dict[str, Any]:
        place = i + len(self) if i < 0 else i
        if not 0 <= place < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self.row(place)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.row(i) for i in range(len(self)))


class Mapped(Rows):
    """The rows of `rows` through a function, computed when they are read. Its errors are BadRows that name the row.

    >>> squares = Mapped([{"x": 2}, {"x": 3}], lambda row: {"y": row["x"] ** 2})
    >>> squares[-1]
    {'y': 9}
    """

    def __init__(self, rows: Any, function: Callable[[dict[str, Any]], dict[str, Any]]):
        self.rows, self.function = rows, function

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        row = self.rows[i]
        try:
            mapped = self.function(row)
        except Exception as error:
            raise bad_row(self.name(i), error) from error
        return {SAMPLE: row[SAMPLE], **mapped} if SAMPLE in row else mapped

    def name(self, i: int) -> str:
        return name_of(self.rows, i)


class Numbered(Rows):
    """The same rows, each with its index as `sample_index`, unless it has one."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        return {SAMPLE: i, **self.rows[i]}

    def name(self, i: int) -> str:
        return name_of(self.rows, i)


def name_of(rows: Any, i: int) -> str:
    """The name of a row of any sequence of rows."""
    return rows.name(i) if hasattr(rows, "name") else f"row {i}"


def column(row: Mapping[str, Any], name: str, where: str = "the row") -> Any:
    """The value of a column. Raises ValueError that names the nearest column and lists all."""
    if name in row:
        return row[name]
    raise ValueError(no_column(name, list(row), where))


def no_column(name: str, columns: list[str], where: str) -> str:
    """The message for a column that does not exist."""
    columns = [c for c in columns if c != SAMPLE]
    near = get_close_matches(name, columns, 1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    return f"{where} has no column {name!r}{hint}; its columns are {', '.join(columns) or 'none'}"
