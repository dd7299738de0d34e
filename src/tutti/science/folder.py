"""Files in the folder of a run: the config it belongs to, and texts that are there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tutti.whole_files import write_text


def differing(tables: dict[str, Any], path: Path) -> list[str]:
    """Keys, as in "run.dt", of tables of a config that differ from those `note` wrote; none without the file.

    Raises ValueError for a damaged file.
    """
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ValueError(f"{path} is damaged; choose another folder by --out, or remove {path.parent}") from None
    names: list[str] = []
    for section, table in json.loads(json.dumps(tables)).items():
        old = before.get(section)
        if isinstance(table, dict):
            names += [f"{section}.{key}" for key, value in table.items() if (old or {}).get(key) != value]
        elif table != old:
            names.append(section)
    return names


def note(tables: dict[str, Any], path: Path) -> None:
    """Write the tables of a config as JSON."""
    write_text(path, json.dumps(tables, indent=1) + "\n")


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of writing in the block (OSError, RuntimeError of HDF5) become an OSError of one line with the path."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise OSError(f"{path} cannot be written: {reason}") from None


def append(path: Path, text: str) -> None:
    """Add text to a file, all of it or nothing. Raises OSError of one line if it cannot be written."""
    with writing(path):
        end = path.stat().st_size
        try:
            with open(path, "a", newline="", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            os.truncate(path, end)
            raise
