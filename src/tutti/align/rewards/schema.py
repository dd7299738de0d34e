"""Check JSON values against schemas: JSON Schema 2020-12, without rarely used keywords.

Schemas with keywords other than those of `KEYWORDS` and `SAYS_NOTHING` are refused, so none is ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

SAYS_NOTHING = {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
                "format", "deprecated", "readOnly", "writeOnly"}  # fmt: skip
TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda x: x is None,
    "boolean": lambda x: isinstance(x, bool),
    "string": lambda x: isinstance(x, str),
    "array": lambda x: isinstance(x, list),
    "object": lambda x: isinstance(x, dict),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    "integer": lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x == int(x),
}
Fits = Callable[[Any, Any, Mapping[str, Any], Any], bool]  # (value, what the keyword says, the schema, the root)
OF_NUMBERS: dict[str, Fits] = {
    "minimum": lambda x, bound, *_: x >= bound,
    "maximum": lambda x, bound, *_: x <= bound,
    "exclusiveMinimum": lambda x, bound, *_: x > bound,
    "exclusiveMaximum": lambda x, bound, *_: x < bound,
    "multipleOf": lambda x, unit, *_: abs(x / unit - round(x / unit)) < 1e-9,
}
OF_STRINGS: dict[str, Fits] = {
    "minLength": lambda x, count, *_: len(x) >= count,
    "maxLength": lambda x, count, *_: len(x) <= count,
    "pattern": lambda x, pattern, *_: re.search(pattern, x) is not None,
}
OF_ARRAYS: dict[str, Fits] = {
    "minItems": lambda x, count, *_: len(x) >= count,
    "maxItems": lambda x, count, *_: len(x) <= count,
    "uniqueItems": lambda x, on, *_: not on or all(not equal(a, b) for i, a in enumerate(x) for b in x[:i]),
    "prefixItems": lambda x, each, _, root: all(fits(a, b, root) for a, b in zip(x, each, strict=False)),
    "items": lambda x, of, schema, root: all(fits(a, of, root) for a in x[len(schema.get("prefixItems", ())) :]),
}
OF_OBJECTS: dict[str, Fits] = {
    "minProperties": lambda x, count, *_: len(x) >= count,
    "maxProperties": lambda x, count, *_: len(x) <= count,
    "required": lambda x, names, *_: all(name in x for name in names),
    "properties": lambda x, of, _, root: all(fits(x[name], of[name], root) for name in of if name in x),
    "additionalProperties": lambda x, of, schema, root: all(
        fits(x[name], of, root) for name in x if name not in schema.get("properties", ())
    ),
}
OF_ALL: dict[str, Fits] = {
    "type": lambda x, kinds, *_: any(TYPES[k](x) for k in named(kinds)),
    "const": lambda x, value, *_: equal(x, value),
    "enum": lambda x, values, *_: any(equal(x, a) for a in values),
    "allOf": lambda x, each, _, root: all(fits(x, a, root) for a in each),
    "anyOf": lambda x, each, _, root: any(fits(x, a, root) for a in each),
    "oneOf": lambda x, each, _, root: sum(fits(x, a, root) for a in each) == 1,
    "not": lambda x, schema, _, root: not fits(x, schema, root),
    "$ref": lambda x, name, _, root: fits(x, referred(name, root), root),
}
OF_TYPES = {"number": OF_NUMBERS, "string": OF_STRINGS, "array": OF_ARRAYS, "object": OF_OBJECTS}
KEYWORDS = OF_ALL | OF_NUMBERS | OF_STRINGS | OF_ARRAYS | OF_OBJECTS


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether a value, as `json.loads` returns it, matches a schema. root: the schema that references are within."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    groups = [OF_ALL, *(group for kind, group in OF_TYPES.items() if TYPES[kind](value))]
    return all(
        group[key](value, said, schema, root) for group in groups for key, said in schema.items() if key in group
    )


def check(schema: Any, root: Any = None, path: str = "#") -> None:
    """Raises ValueError for a schema with an unknown keyword, type or reference."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"the schema at {path} is {schema!r}; expected an object, or true or false")
    for key, said in schema.items():
        if key not in KEYWORDS and key not in SAYS_NOTHING:
            raise ValueError(f"the schema has {key} at {path}; known are {', '.join(sorted(KEYWORDS))}")
        if key == "type" and not set(named(said)) <= set(TYPES):
            raise ValueError(f"type {said!r} at {path}; expected {', '.join(TYPES)}")
        if key == "pattern":
            re.compile(said)
        if key == "$ref":
            referred(said, root)
        within: Any = ()
        if key in ("properties", "$defs", "definitions"):
            within = said.items()
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems"):
            within = enumerate(said)
        for name, part in within:
            check(part, root, f"{path}/{key}/{name}")
        if key in ("not", "items", "additionalProperties"):
            check(said, root, f"{path}/{key}")


def named(types: Any) -> list[str]:
    """The names of one or several types."""
    return [types] if isinstance(types, str) else list(types)


def referred(name: str, root: Any) -> Any:
    """The part of the root that a reference such as "#/$defs/point" is to."""
    place = root
    try:
        if name[:1] != "#":
            raise KeyError
        for part in name[1:].strip("/").split("/") if len(name) > 1 else ():
            place = place[part.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise ValueError(f"$ref {name!r} is to nothing within the schema") from None
    return place


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same in JSON: 1 is 1.0, and not true."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return isinstance(a, bool) == isinstance(b, bool) and a == b
