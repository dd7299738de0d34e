"""A run's config from a TOML or YAML file and the command line.

The tables of the file are the sections of `Config`, `[optimizer] lr = 3e-4`; the command line overrides them,
`--optimizer.lr 3e-4`. An unknown key is an error that names the nearest key; a value of another type is one that names
the type.

`include = "base.toml"`, or a list of files, merges other files first. Their paths are relative to the file.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from tutti.train.config import Config, check


class Checkable(Protocol):
    """A config whose values can be wrong together."""

    def check(self) -> None: ...


C = TypeVar("C", bound=Checkable)


def parse(args: list[str]) -> Config:
    """The config of `tutti train [FILE.toml] [--section.key value ...]`; SystemExit 2 for a bad option."""
    import tyro

    file, options = (Path(args[0]), args[1:]) if args and not args[0].startswith("-") else (None, args)
    config = tyro.cli(
        Config,
        prog=f"tutti train {file or '[FILE.toml]'}",
        args=options,
        default=load(file) if file else Config(),
        config=(tyro.conf.FlagConversionOff,),
    )
    check(config)
    return config


def load(file: Path) -> Config:
    """Read a TOML or YAML file. A ValueError names the file, the key, and what is expected."""
    return from_table(read(file), str(file))


def read(file: Path, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a TOML or YAML file, over those of the files that it includes.

    within: the files that include this one. Raises ValueError for files that cannot be read or include themselves.
    """
    if file.resolve() in within:
        raise ValueError(f"{file} includes itself, through {' and '.join(x.name for x in within)}")
    try:
        text = file.read_text("utf-8")
        table = _yaml(text) if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except FileNotFoundError:
        near = get_close_matches(str(file), [str(x) for x in file.parent.glob("*.*ml")], 1, 0.5)
        raise ValueError(f"no file {file}{f'; did you mean {near[0]}?' if near else ''}") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a folder; give a TOML or YAML file") from None
    except (ValueError, UnicodeDecodeError) as e:
        raise ValueError(f"{file}: {e}") from None
    others = table.pop("include", [])
    merged: dict[str, Any] = {}
    for other in [others] if isinstance(others, str) else others:
        merged = _over(merged, read(file.parent / other, (*within, file.resolve())))
    return _over(merged, table)


def checked(kind: type[C], file: Path) -> C:
    """Read a config of a class that has a method `check`. Raises ValueError that names the file, the key and the
    remedy."""
    config = build(kind, read(file), str(file))
    try:
        config.check()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return config


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ValueError(" ".join(str(e).split())) from None
    if not isinstance(table, dict):
        raise ValueError("it holds no keys and values")
    return table


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Nested tables merged; values of `above` win."""
    made = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = _over(made[key], value) if both else value
    return made


def from_table(table: dict[str, Any], file: str) -> Config:
    """A config from nested tables of TOML or JSON. Errors name the `file`."""
    return build(Config, table, file)


def build(kind: type, table: dict[str, Any], file: str, section: str = "", root: type | None = None) -> Any:
    """A dataclass from nested tables. Errors name the `file` and the key. section: where the table stands in it.
    root: the dataclass of the whole file, to name keys of other sections."""
    types, root = get_type_hints(kind), root or kind
    values = {}
    for key, value in table.items():
        where = f"{section}.{key}" if section else key
        if key not in types:
            raise ValueError(f"{file}: there is no key {where}; {_nearest(key, section, types, root)}")
        if inner := _section(types[key]):
            if not isinstance(value, dict):
                raise ValueError(f"{file}: {where} is a section: write [{where}] and its keys below")
            values[key] = build(inner, value, file, where, root)
        elif get_origin(types[key]) is tuple and is_dataclass(each := get_args(types[key])[0]):
            if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
                raise ValueError(f"{file}: {where} is a list of sections: write [[{where}]] and its keys below")
            values[key] = tuple(build(each, x, file, where, each) for x in value)  # type: ignore[arg-type]
        elif not _fits(value, types[key]):
            raise ValueError(f"{file}: {where} = {value!r} should be {type_name(types[key])}")
        else:
            values[key] = tuple(value) if isinstance(value, list) else value
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{file}: {f'[{section}]' if section else 'the file'} needs {', '.join(missing)}")
    return kind(**values)


def _section(kind: Any) -> Any:
    """The dataclass of a section, or of one that may be left out; None for other types."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((k for k in kinds if is_dataclass(k)), None)


def _nearest(key: str, section: str, known: Iterable[str], root: type) -> str:
    """The most similar key of this section, else all of them, and an equal one of another section."""
    prefix = f"{section}." if section else ""
    if near := get_close_matches(key, known, 1):
        return f"did you mean {prefix}{near[0]}?"
    own = f"{f'[{section}]' if section else 'the file'} has {', '.join(known)}"
    elsewhere = [f"{name}.{key}" for name, inner in get_type_hints(root).items()
                 if is_dataclass(inner) and key in get_type_hints(inner)]  # fmt: skip
    if elsewhere and section:
        return f"{own}; {elsewhere[0]} is another"
    return f"did you mean {elsewhere[0]}?" if elsewhere else own


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, k) for k in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        several = inner[:1] * len(value) if isinstance(value, list) and inner[-1] is ... else inner
        return isinstance(value, list) and len(value) == len(several) and all(map(_fits, value, several))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, inner[1]) for v in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def type_name(kind: Any) -> str:
    """A type in words: `a number`, `one of 'O0', 'O2'`, `a list of strings`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(type_name(k) for k in inner if k is not NoneType)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin is tuple:
        several = inner[-1] is ...
        return f"a list of {type_name(inner[0]).removeprefix('a ')}s" if several else f"a list of {len(inner)} numbers"
    if origin is dict:
        return "a table"
    return {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}[kind]
