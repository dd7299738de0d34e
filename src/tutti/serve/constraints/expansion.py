"""How large a JSON schema becomes when its references are followed, found without following them.

A reference on its own is compiled once, however often it occurs. One that is combined with other keywords, or occurs in
`allOf`, is merged into its place each time: n levels of two such references are 2^n schemas.
"""

from __future__ import annotations

from urllib.parse import unquote

from tutti.serve.values import JsonValue, JsonView

DEEPEST = 64  # levels of objects and arrays
LARGEST = 4096  # schemas that are merged into one place
NOTES = {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}


def check(schema: JsonValue) -> None:
    """Raise ValueError for a JSON schema that is nested too deeply, or whose references expand to too much."""
    nested(schema, "the schema")
    sizes: dict[int, int] = {}
    for one in _schemas(schema):
        if "allOf" in one or ("$ref" in one and one.keys() - NOTES - {"$ref"}):
            size = _size(one, schema, sizes)
            if size > LARGEST:
                raise ValueError(
                    f"the schema's references in allOf expand to more than {LARGEST} schemas; refer to each definition "
                    "once, without allOf"
                )


def nested(value: JsonValue, name: str, most: int = DEEPEST) -> None:
    """Raise ValueError for a JSON value with more levels than `most`. name: name of the value in messages."""
    level, values = 0, [value]
    while values:
        level += 1
        if level > most + 1:
            raise ValueError(f"{name} is nested more than {most} levels deep")
        values = [y for x in values if isinstance(x, (dict, list)) for y in (x.values() if isinstance(x, dict) else x)
                  if isinstance(y, (dict, list))]  # fmt: skip


def _schemas(schema: JsonValue) -> list[JsonView]:
    """All objects in a schema."""
    objects, rest = [], [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            objects.append(one)
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return objects


def _size(schema: JsonValue, root: JsonValue, sizes: dict[int, int]) -> int:
    """Number of schemas that are merged in the place of one; a reference to itself counts as one."""
    stack = [(schema, False)]
    while stack:
        one, seen = stack.pop()
        if not isinstance(one, dict):
            continue
        parts = [x for x in one.get("allOf", ()) if isinstance(x, dict)] if isinstance(one.get("allOf"), list) else []
        if isinstance(reference := one.get("$ref"), str) and isinstance(target := _target(reference, root), dict):
            parts = [*parts, target]
        if seen:
            sizes[id(one)] = min(LARGEST + 1, 1 + sum(max(1, sizes.get(id(x), 1)) for x in parts))
        elif id(one) not in sizes:
            sizes[id(one)] = 0
            stack.append((one, True))
            stack += [(x, False) for x in parts]
    return sizes[id(schema)]


def _target(reference: str, root: JsonValue) -> JsonValue:
    """The schema that a reference within the document names; None if there is none."""
    if not reference.startswith("#"):
        return None
    here = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict):
            here = here.get(step)
        elif isinstance(here, list) and step.isdigit() and int(step) < len(here):
            here = here[int(step)]
        else:
            return None
    return here
