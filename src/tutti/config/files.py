"""Config files: TOML or YAML, with files that they include and options over them.

`include = "base.toml"`, or a list of files, merges other files first. Their paths are relative to the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def read(file: Path, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a TOML or YAML file, over those of the files that it includes.

    within: the files that include this one. Raises ValueError for files that cannot be read or include themselves.
    """
    if file.resolve() in within:
        raise ValueError(f"{file} includes itself, through {' and '.join(x.name for x in within)}")
    kind = "YAML" if file.suffix in (".yaml", ".yml") else "TOML"
    try:
        text = file.read_text("utf-8")
        table = _yaml(text) if kind == "YAML" else tomllib.loads(text)
    except FileNotFoundError:
        near = get_close_matches(str(file), [str(x) for x in file.parent.glob("*.*ml")], 1, 0.5)
        raise ValueError(f"there is no file {file}{f'; did you mean {near[0]}?' if near else ''}") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a folder; give a TOML or YAML file") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not {kind}: {e}") from None
    included = table.pop("include", [])
    others = [included] if isinstance(included, str) else included
    if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
        raise ValueError(f'{file}: include is a file or a list of files: include = "base.toml"')
    merged: dict[str, Any] = {}
    for other in others:
        merged = _over(merged, read(file.parent / other, (*within, file.resolve())))
    return _over(merged, table)


def with_options(table: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The table with values of a command line over it: `--section.key value`. Values are written as in TOML; what is no
    TOML is a string.

    >>> with_options({"out": "a", "data": {"train": "x.jsonl"}}, ["--data.train", "y.jsonl", "--seed", "3"])
    {'out': 'a', 'data': {'train': 'y.jsonl'}, 'seed': 3}

    Raises ValueError for arguments that are not pairs.
    """
    words = list(arguments)
    while words:
        name, _, value = words.pop(0).partition("=")
        if not name.startswith("--") or (not value and not words):
            raise ValueError(f"{name}: options of a config are written --section.key value")
        nested: Any = toml_value(value or words.pop(0))
        for key in reversed(name.removeprefix("--").split(".")):
            nested = {key.replace("-", "_"): nested}
        table = _over(table, nested)
    return table


def toml_value(text: str) -> Any:
    """A value as TOML writes it, or the text itself if it is none.

    >>> toml_value("3e-4"), toml_value("[1, 2]"), toml_value("reviews.jsonl")
    (0.0003, [1, 2], 'reviews.jsonl')
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ValueError(" ".join(str(e).split())) from None
    if not isinstance(table, dict):
        raise ValueError("it holds no keys and values")
    _check_keys(table, set())
    return table


def _check_keys(value: Any, visited: set[int]) -> None:
    """Raise ValueError for a key that is no string. visited: ids of values, which YAML may alias many times."""
    if not isinstance(value, dict | list) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"the key {odd[0]!r} is no string; write it in quotes")
        value = list(value.values())
    for inner in value:
        _check_keys(inner, visited)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Nested tables merged; values of `above` win."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged
