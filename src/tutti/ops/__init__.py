"""Rules: how each operator can be split. Importing the modules of the families fills the tables."""

from importlib import import_module
from pkgutil import iter_modules

from tutti.ops.registry import (
    Cut,
    operands,
    replicated,
    rule_of,
    source,
    specs,
)
from tutti.ops.rule import Rule, parse

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")

__all__ = [
    "Cut",
    "Rule",
    "operands",
    "parse",
    "replicated",
    "rule_of",
    "source",
    "specs",
]
