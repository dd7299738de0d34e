"""Dataclasses from the tables of a config file.

The tables of the file are the sections of the dataclass, `[optimizer] lr = 3e-4`. An unknown key is an error that names
the nearest key; a value of another type is one that names the type.
"""

from __future__ import annotations

import ast
import inspect
import reprlib
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from tutti.config.files import read


class Checkable(Protocol):
    """A config whose values can be wrong together."""

    def check(self) -> None: ...


C = TypeVar("C", bound=Checkable)
SHORT = reprlib.Repr()  # of a value, which YAML's aliases can make exponentially long
SHORT.maxlevel, SHORT.maxstring, SHORT.maxlist = 3, 200, 20


def checked(kind: type[C], file: Path) -> C:
    """Read a config of a class that has a method `check`. Raises ValueError that names the file, the key and the
    remedy."""
    return check_table(kind, read(file), str(file))


def check_table(kind: type[C], table: dict[str, Any], file: str) -> C:
    """The config of nested tables, checked. Errors name the `file`."""
    config = build(kind, table, file)
    try:
        config.check()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return config


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
        elif each := _repeated(types[key]):
            if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
                raise ValueError(f"{file}: {where} is a list of sections: write [[{where}]] and its keys below")
            values[key] = tuple(build(each, x, file, where, each) for x in value)
        elif not _fits(value, types[key]):
            raise ValueError(f"{file}: {where} = {SHORT.repr(value)} should be {type_name(types[key])}")
        else:
            values[key] = tuple(value) if isinstance(value, list) else value
    if missing := [words for name, words in _required(kind).items() if name not in values]:
        raise ValueError(f"{file}: {f'[{section}]' if section else 'the file'} needs {', '.join(missing)}")
    return kind(**values)


def _required(kind: type) -> dict[str, str]:
    """The keys without default, as they are written: those of a section after its name, `[data] train`."""
    types, keys = get_type_hints(kind), {}
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING:
            inner = _section(types[field.name])
            keys[field.name] = f"[{field.name}] {', '.join(_required(inner).values())}" if inner else field.name
    return keys


def keys(kind: type) -> list[str]:
    """Lines that list the keys of a config, with their types and defaults."""
    return [f"  {name:24} {what}" + (f"; {default} without it" if default else "")
            for name, what, default, _ in rows(kind)]  # fmt: skip


def rows(kind: type, section: str = "") -> list[tuple[str, str, str, str]]:
    """(key, type in words, default or "", meaning or "") of all keys of a config. Keys of a list of sections follow
    `[]`."""
    types, about, listed = get_type_hints(kind), meanings(kind), []
    for field in fields(kind):
        name, own = f"{section}{field.name}", types[field.name]
        if inner := _section(own):
            listed += rows(inner, f"{name}.")
        elif each := _repeated(own):
            listed += rows(each, f"{name}[].")
        else:
            default = "" if field.default is MISSING or field.default is None else repr(field.default)
            listed.append((name, type_name(own), default, about.get(field.name, "")))
    return listed


def meanings(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass."""
    (declared,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(declared, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, below in zip(declared.body, [*declared.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            texts[field.target.id] = " ".join(str(text).split())
    return texts


def _section(kind: Any) -> Any:
    """The dataclass of a section, or of one that may be left out; None for other types."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((k for k in kinds if is_dataclass(k)), None)


def _repeated(kind: Any) -> Any:
    """The dataclass of each section of a list of sections; None for other types."""
    inner = get_args(kind)
    return inner[0] if get_origin(kind) is tuple and is_dataclass(inner[0]) else None


def _nearest(key: str, section: str, keys: Iterable[str], root: type) -> str:
    """The most similar key of this section, else all of them, and an equal one of another section."""
    prefix = f"{section}." if section else ""
    if near := get_close_matches(key, keys, 1):
        return f"did you mean {prefix}{near[0]}?"
    own = f"{f'[{section}]' if section else 'the file'} has {', '.join(keys)}"
    elsewhere = [f"{name}.{key}" for name, inner in get_type_hints(root).items()
                 if is_dataclass(inner) and key in get_type_hints(inner)]  # fmt: skip
    if elsewhere and section:
        return f"{own}; {elsewhere[0]} is another"
    return f"did you mean {elsewhere[0]}?" if elsewhere else own


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
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
    return {float: "a number", int: "a whole number", str: "a string", bool: "true or false", Any: "a value"}[kind]
