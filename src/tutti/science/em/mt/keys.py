"""Keys of a config, read from the dataclasses that declare them: documentation, and checks of numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from tutti.config.build import meanings, type_name


class Quantity(NamedTuple):
    """The unit of a number in a config, and its range: "positive", "not negative" or any."""

    unit: str = ""
    must_be: str = ""


class Key(NamedTuple):
    """A row of the documentation."""

    name: str
    type: str
    unit: str
    default: Any
    required: bool
    meaning: str


def sections(kind: type, name: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """Heading, description and keys of a table and those in it: "[survey]", or "[[model.bodies]]" for one of several;
    "" for the keys above all sections."""
    inner: list[tuple[str, type]] = []
    rows, plain, about = [], get_type_hints(kind), meanings(kind)
    annotated = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        where = f"{name.strip('[]')}.{each.name}".strip(".")
        table, several = _table(plain[each.name])
        if table:
            inner.append((f"[[{where}]]" if several else f"[{where}]", table))
        else:
            quantity = _quantity(annotated[each.name])
            required = each.default is MISSING
            default = None if required else each.default
            rows.append(Key(each.name, type_name(plain[each.name]), quantity.unit, default, required, about[each.name]))
    yield name, " ".join((inspect.getdoc(kind) or "").split()), rows
    for heading, table in inner:
        yield from sections(table, heading)


def check(config: Any, name: str = "") -> None:
    """Raises ValueError for a number outside of the range of its `Quantity`."""
    for key, kind in get_type_hints(type(config), include_extras=True).items():
        value, where = getattr(config, key), f"{name}.{key}".strip(".")
        for i, each in enumerate(value if isinstance(value, tuple) else (value,)):
            if is_dataclass(each):
                check(each, f"{where}[{i}]" if isinstance(value, tuple) else where)
            elif isinstance(each, int | float) and not isinstance(each, bool):
                _check(where, each, _quantity(kind))


def _check(where: str, x: float, quantity: Quantity) -> None:
    rule = quantity.must_be
    low = 0.0 if rule else -math.inf
    if not x >= low or (rule == "positive" and not 0 < x < math.inf):
        unit = f", in {quantity.unit}" if quantity.unit else ""
        must = "must not be negative" if rule == "not negative" else f"must be {rule or 'a number'}"
        raise ValueError(f"{where} = {x:g} {must}{unit}")


def _table(kind: Any) -> tuple[type | None, bool]:
    """The dataclass of a section, and whether it is one of several."""
    for each in (kind, *get_args(kind)):
        if is_dataclass(each):
            return each, get_origin(kind) is tuple  # type: ignore[return-value]
    return None, False


def _quantity(kind: Any) -> Quantity:
    if get_origin(kind) is Annotated:
        return kind.__metadata__[0]
    return next((q for q in map(_quantity, get_args(kind)) if q != Quantity()), Quantity())
