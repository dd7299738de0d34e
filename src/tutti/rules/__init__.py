"""Rules: how each operator can be split. Importing a family's module fills the table."""

from tutti.rules import attention, create, embedding, loss, matmul, norm, pointwise, reduction, update, view
from tutti.rules.registry import (
    ARGUMENTS,
    CONTIGUOUS,
    LOCAL,
    RULES,
    SENDS,
    Cut,
    operands,
    replicated,
    rule_of,
    source,
    specs,
)
from tutti.rules.rule import Rule, parse

__all__ = [
    "ARGUMENTS",
    "CONTIGUOUS",
    "LOCAL",
    "RULES",
    "SENDS",
    "Cut",
    "Rule",
    "attention",
    "create",
    "embedding",
    "loss",
    "matmul",
    "norm",
    "operands",
    "parse",
    "pointwise",
    "reduction",
    "replicated",
    "rule_of",
    "source",
    "specs",
    "update",
    "view",
]
