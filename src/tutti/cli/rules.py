"""The verb `tutti rules`: the table of rules, how often a model uses each, and their check on random calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Annotated, Any

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import fx

from tutti import compat
from tutti.ir.op_info import LOCAL, RULES
from tutti.ir.step_graph import StepGraph
from tutti.launch.progress import progress
from tutti.ops import rule_of
from tutti.tracing.capture import capture
from tutti.tracing.load import load, suiting

TAG = "a b -> a b, elementwise by torch's tag"
NONE = "no rule: computed whole on every device"
EXAMPLES = 20  # samples per operator
COUNTED = ("times", "samples", "split cases", "forbidden tried")


def show_rules(
    operators: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    model: str | None = None,
    batch: int = 8,
    seq: int = 128,
    check: bool = False,
    examples: int | None = None,
) -> int:
    """Print how each operator can be split, in the notation of `tutti.ops.rule`.

    `m k, k n -> m n` names the dims of operands and outputs by factors. Splitting a factor splits each dim that has
    it; an output without it becomes a partial sum. `k!` cannot be split; `v@` and `v*` need a local computation
    (and contiguous parts); `~0` marks operands that may be partial sums.

    --check draws random calls, splits each in all ways that its rule allows, and compares the combined parts with the
    unsplit result. It also tries the splits that the rule forbids. The exit code is 1 if a rule is wrong.

    Args:
        operators: Only operators of these names, `mm` or `aten.mm`. A name that matches none selects all operators
            that contain it.
        model: Only operators of this model, with the rule for their shapes and the number of calls: a folder with a
            transformers config.json, such a file, or package.module:function that returns (model, batch).
            The module is imported and the function is called: name only code that you trust.
        batch: Sequences or images in the batch of a transformers model.
        seq: Tokens per sequence.
        check: Check the rules on random calls.
        examples: With --check, the number of calls drawn per operator. Default: 20.
    """
    if examples is not None and not check:
        raise ValueError("--examples sets the number of calls that --check draws: add --check")
    if examples is not None and examples < 1:
        raise ValueError(f"--examples is {examples}; it must be at least 1")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    graph = _captured(model, batch, seq) if model is not None else None
    if check:
        return check_rules(operators, graph, examples or EXAMPLES, console)
    if graph is None:
        targets = [*RULES, *(_by_tag() if operators else ())]
        rows = [(name(t), notation(RULES.get(t, TAG)), "yes" if t in LOCAL else "") for t in targets]
        console.print(_table(["operator", "rule", "local computation"], matching(rows, operators)))
        for text in operators:
            if more := len([row for row in rows if text in row[0]]) - len(matching(rows, (text,))):
                console.print(f"{more} more operator names contain {text!r}")
        return 0
    rows = matching(list(operators_of(graph)), operators)
    console.print(_table(["operator", "rule for these shapes", "times"], rows))
    missing = sum(int(times) for _, line, times in rows if line == NONE)
    console.print(f"{len(rows)} rows; {missing} calls without a rule")
    return 0


def _captured(source: str, batch: int, seq: int) -> StepGraph:
    model, example = load(source, batch, seq)
    with suiting(model):
        return capture(model, example)


def check_rules(operators: tuple[str, ...], graph: StepGraph | None, examples: int, console: Console) -> int:
    """Check the rules of the named operators (of a graph's operators, if given) and print the counts. Returns 1 if a
    rule is wrong, after printing the smallest sample found that shows it, else 0."""
    try:
        from tutti.check.machine import prove
        from tutti.check.samples.sample import DEVICES, SAMPLES
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ValueError("checking rules needs the package hypothesis: pip install 'tutti[check]'") from None
    targets = {name(t): t for t in (_targets(graph) if graph else [*RULES, *SAMPLES]) if t is not torch.Tag.pointwise}
    chosen = [row[0] for row in matching([(text, "", "") for text in targets], operators)]
    rows, wrong, remarks = [], [], []
    with progress("checking") as tell:
        for done, text in enumerate(chosen):
            tell.count(done, len(chosen), text)
            device = DEVICES.get(targets[text], "cpu")
            if targets[text] not in SAMPLES:
                rows.append((text, "none", "", ""))
                continue
            if device != "cpu" and not torch.cuda.is_available():
                rows.append((text, f"only on {device}", "", ""))
                continue
            try:
                report = prove(targets[text], SAMPLES[targets[text]], examples)
            except Exception as error:  # a rule that does not fit its operator raises anything
                wrong.append(f"{text}: {error}")
                rows.append((text, "wrong", "", ""))
            else:
                tried = sum(report.strict.values()) + sum(report.needless.values())
                rows.append((text, *map(str, (report.samples, report.cases, tried))))
                remarks += [f"{text} forbids a valid split: {what}" for what in report.needlessly_forbidden]
                if report.unpriced:
                    remarks.append(f"{text} sends {report.unpriced} bytes that the planner does not price")
    console.print(_table(["operator", *COUNTED[1:]], rows))
    cases = sum(int(row[2] or 0) for row in rows)
    without = sum(row[1] == "none" for row in rows)
    console.print(f"{len(rows)} operators, {cases} split cases; {without} without samples, {len(wrong)} wrong")
    for line in remarks + wrong:
        console.print(line, markup=False, soft_wrap=True)
    return 1 if wrong else 0


def _targets(graph: StepGraph) -> Iterable[Any]:
    return (node.target for node in graph.calls if isinstance(node.target, torch._ops.OpOverload))


def _by_tag() -> Iterable[Any]:
    """The operators covered by the rule of torch's pointwise tag."""
    for target in compat.operators("aten"):
        if torch.Tag.pointwise in target.tags and target not in RULES and not target._schema.is_mutable:
            yield target


def matching(rows: list[tuple[str, str, str]], names: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """The rows of the operators of these names, else of those whose name contains one. All rows without names.

    Raises ValueError with the nearest name if a name matches none.
    """
    matched = set() if names else set(rows)
    for part in names:
        exact = {row for row in rows if part in _names(row[0])}
        matched |= exact or {row for row in rows if part in row[0]}
        if not exact and not any(part in row[0] for row in rows):
            near = get_close_matches(part, [word for row in rows for word in _names(row[0])], 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"no operator contains {part!r}{hint}")
    return sorted(matched)


def _names(operator: str) -> set[str]:
    """The names that match an operator: `aten.sum.dim_IntList`, `sum.dim_IntList`, `aten.sum` and `sum`."""
    namespace, *rest = operator.split(".")
    return {operator, ".".join(rest), f"{namespace}.{rest[0]}", rest[0]}


def operators_of(graph: StepGraph) -> list[tuple[str, str, str]]:
    """(operator, rule, number of calls) of a graph, with the rule for the operator's shapes."""
    times: Counter[tuple[str, str]] = Counter()
    for node in graph.calls:
        if isinstance(node.target, torch._ops.OpOverload):
            rule = rule_of(node)
            times[name(node.target), rule.notation if rule else NONE] += 1
    return [(operator, line, str(count)) for (operator, line), count in times.items()]


def name(target: Any) -> str:
    """`aten.mm` for aten.mm.default; other overloads keep their name."""
    return "torch.pointwise (tag)" if target is torch.Tag.pointwise else str(target).removesuffix(".default")


def notation(rule: str | Callable[[fx.Node], Any]) -> str:
    """A rule as text. If the rule is a function of the call's arguments, the name of its module."""
    if isinstance(rule, str):
        return rule
    return f"by its arguments ({rule.__module__})"


def _table(head: list[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in head:
        whole = title in ("operator", *COUNTED)
        table.add_column(title, overflow="fold", no_wrap=whole, justify="right" if title in COUNTED else "left")
    for row in rows:
        table.add_row(*row)
    return table
