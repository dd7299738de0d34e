"""The verb `tutti rules`: the table of rules, or how often a model uses each."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import fx

from tutti.graph.capture import capture
from tutti.graph.load import load
from tutti.graph.step_graph import StepGraph
from tutti.rules import LOCAL, RULES, rule_of

NONE = "no rule: computed whole on every device"


def show_rules(
    operator: Annotated[str, tyro.conf.Positional] = "",
    model: str | None = None,
    batch: int = 8,
    seq: int = 128,
) -> None:
    """Print how each operator can be split, in the notation of `tutti.rules.rule`.

    `m k, k n -> m n` names the dims of operands and outputs by factors. Splitting a factor splits every dim that holds
    it; an output without it becomes a partial sum. `k!` must stay whole; `v@` and `v*` need a computation of their own
    (and contiguous parts); `~0` marks operands that may be partial sums.

    Args:
        operator: Show only operators whose name contains this.
        model: Show the operators of this model, the rule of each for its shapes, and how often it occurs: a folder
            with a config.json of transformers, such a file, or package.module:function that returns (model, batch).
        batch: Sequences in the batch of a model of transformers.
        seq: Tokens of each.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if model is None:
        rows = [(name(target), notation(rule), "yes" if target in LOCAL else "") for target, rule in RULES.items()]
        console.print(_table(["operator", "rule", "computation of its own"], matching(rows, operator)))
        return
    graph = capture(*load(model, batch, seq))
    rows = matching(list(operators_of(graph)), operator)
    console.print(_table(["operator", "rule for these shapes", "times"], rows))
    missing = sum(int(times) for _, line, times in rows if line == NONE)
    console.print(f"{len(rows)} rows; {missing} calls without a rule")


def matching(rows: list[tuple[str, str, str]], part: str) -> list[tuple[str, str, str]]:
    """The rows whose operator contains this text. ValueError with the nearest name where none does."""
    found = sorted(row for row in rows if part in row[0])
    if not found:
        near = get_close_matches(part, [word for row in rows for word in (row[0], row[0].split(".")[1])], 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(f"no operator contains {part!r}{hint}")
    return found


def operators_of(graph: StepGraph) -> list[tuple[str, str, str]]:
    """(operator, rule, number of calls) of a graph, the rule as it is for the operator's shapes."""
    times: Counter[tuple[str, str]] = Counter()
    for node in graph.calls:
        if isinstance(node.target, torch._ops.OpOverload):
            rule = rule_of(node)
            times[name(node.target), rule.notation if rule else NONE] += 1
    return [(operator, line, str(count)) for (operator, line), count in times.items()]


def name(target: Any) -> str:
    """`aten.mm` of the operator's overload; the default overload is not named."""
    return "torch.pointwise (tag)" if target is torch.Tag.pointwise else str(target).removesuffix(".default")


def notation(rule: str | Callable[[fx.Node], Any]) -> str:
    """A rule as text; where its line is written for the arguments of each call, the module that does so."""
    if isinstance(rule, str):
        return rule
    return f"by its arguments ({rule.__module__})"


def _table(head: list[str], rows: list[tuple[str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in head:
        table.add_column(title, overflow="fold", justify="right" if title == "times" else "left")
    for row in rows:
        table.add_row(*row)
    return table
