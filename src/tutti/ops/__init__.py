"""Rules: how each operator can be split. Importing the modules of the families fills the tables."""

from importlib import import_module
from pkgutil import walk_packages

from tutti.ops.registry import (
    Cut,
    operands,
    replicated,
    rule_of,
    source,
    specs,
)
from tutti.ops.rule import Rule, parse

for _family in walk_packages(__path__, f"{__name__}."):
    import_module(_family.name)

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
