"""Configs of corpora, and a corpus as the text of a training run.

[corpus]                      # the fields of `tutti.data.corpus.Pipeline`
out = "out/corpus"

[[source]]                    # the fields of `Source`
path = "raw/*.jsonl.gz"

[[step]]                      # `type` is a name in `STEPS`; the others are its fields
type = "language"
keep = ["en"]
"""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tutti.config.build import build
from tutti.config.files import read
from tutti.data.corpus import STEPS, Pipeline, Source, Step
from tutti.train.values import NamedValues, Row

_SECTIONS = ("corpus", "source", "step")


def load_pipeline(file: Path, **over: Any) -> Pipeline:
    """The pipeline of a TOML file. over: values of `[corpus]` that replace those of the file; None: none.

    Raises ValueError that names the file, the key and what is expected.
    """
    table = read(file)
    for key in table:
        if key not in _SECTIONS:
            near = get_close_matches(key, _SECTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_SECTIONS)}"
            raise ValueError(f"{file}: there is no section {key}; {hint}")
    sources, steps = (_list(table, name, file) for name in ("source", "step"))
    settings = {**table.get("corpus", {}), **{k: v for k, v in over.items() if v is not None}}
    own = {f.name for f in fields(Pipeline)} - {"steps", "sources"}
    for key in settings:
        if key not in own:
            near = get_close_matches(key, own, 1)
            hint = f"did you mean corpus.{near[0]}?" if near else f"[corpus] has {', '.join(sorted(own))}"
            raise ValueError(f"{file}: there is no key corpus.{key}; {hint}")
    settings.setdefault("out", str(Path("out") / file.stem))
    for key, value in settings.items():
        if key in ("split", "memory", "longest"):
            settings[key] = size_of(value, f"{file}: corpus.{key}")
    try:
        return Pipeline(
            tuple(_step(row, k, file) for k, row in enumerate(steps)),
            tuple(build(Source, row, str(file), "source") for row in sources),
            **settings,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {str(error).removeprefix(f'{file}: ')}") from None


def size_of(value: object, where: str) -> int:
    """Bytes of a number, or of a string such as "64 MB" or "2 GiB"."""
    units = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number, _, unit = str(value).strip().partition(" ")
    try:
        return int(float(number) * units[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f'{where} is {value!r}; give bytes, or a number and a unit such as "64 MB"') from None


def _list(table: NamedValues, name: str, file: Path) -> list[Row]:
    rows = table.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise ValueError(f"{file}: {name} is a list of sections: write [[{name}]] and its keys below")
    return rows


def _step(row: Row, place: int, file: Path) -> Step:
    values = dict(row)
    kind = values.pop("type", None)
    if kind not in STEPS:
        near = get_close_matches(str(kind), STEPS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(STEPS)}"
        raise ValueError(f"{file}: [[step]] number {place + 1} has type {kind!r}; {hint}")
    if kind == "mix" and "size" in values:
        values["size"] = size_of(values["size"], f"{file}: step.mix.size")
    return build(STEPS[kind], values, str(file), f"step.{kind}", STEPS[kind])
