"""The verb `tutti rules`: the table of rules, how often a model uses each, and their proof by machine."""

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
from rich.progress import Progress
from rich.table import Table
from torch import fx

from tutti import compat
from tutti.ir.step_graph import StepGraph
from tutti.ops import LOCAL, RULES, rule_of
from tutti.tracing.capture import capture
from tutti.tracing.load import load, suiting

TAG = "a b -> a b, elementwise by torch's tag"
NONE = "no rule: computed whole on every device"
EXAMPLES = 20  # samples of each operator
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

    `m k, k n -> m n` names the dims of operands and outputs by factors. Splitting a factor splits every dim that holds
    it; an output without it becomes a partial sum. `k!` must stay whole; `v@` and `v*` need a computation of their own
    (and contiguous parts); `~0` marks operands that may be partial sums.

    With --check calls are drawn at random, each is split in every way that its rule allows, and the parts put together
    must be the whole; what the rule forbids is tried as well. The exit code is 1 where a rule is wrong.

    Args:
        operators: Only operators of these names, `mm` or `aten.mm`; where there is none, those that contain it.
        model: Only operators of this model, the rule of each for its shapes, and how often it occurs: a folder with a
            config.json of transformers, such a file, or package.module:function that returns (model, batch).
            The module is imported and the function is run: name only code that you trust.
        batch: Sequences or images in the batch of a model of transformers.
        seq: Tokens of each sequence.
        check: Prove the rules.
        examples: With --check, how many calls of each operator are drawn; 20 by default.
    """
    if examples is not None and not check:
        raise ValueError("--examples says how much --check tries; it has no effect without")
    if examples is not None and examples < 1:
        raise ValueError(f"--examples is {examples}; it must be at least 1")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    graph = _captured(model, batch, seq) if model is not None else None
    if check:
        return check_rules(operators, graph, examples or EXAMPLES, console)
    if graph is None:
        targets = [*RULES, *(_by_tag() if operators else ())]
        rows = [(name(t), notation(RULES.get(t, TAG)), "yes" if t in LOCAL else "") for t in targets]
        console.print(_table(["operator", "rule", "computation of its own"], matching(rows, operators)))
        for text in operators:
            if more := len([row for row in rows if text in row[0]]) - len(matching(rows, (text,))):
                console.print(f"{more} more operators have names that contain {text!r}")
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
    """Prove the rules of the operators of these names (of a graph's, where there is one), and print what was tried; 1
    where one is wrong, with the smallest sample found for which it is, else 0."""
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
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=len(chosen))
        for done, text in enumerate(chosen):
            bar.update(task, description=text, completed=done)
            device = DEVICES.get(targets[text], "cpu")
            if targets[text] not in SAMPLES:
                rows.append((text, "none", "", ""))
                continue
            if device != "cpu" and not torch.cuda.is_available():
                rows.append((text, f"only on {device}", "", ""))
                continue
            try:
                report = prove(targets[text], SAMPLES[targets[text]], examples)
            except Exception as error:  # a rule that does not even fit its operator fails in other ways
                wrong.append(f"{text}: {error}")
                rows.append((text, "wrong", "", ""))
            else:
                tried = sum(report.strict.values()) + sum(report.needless.values())
                rows.append((text, *map(str, (report.samples, report.cases, tried))))
                remarks += [f"{text} forbids what is right: {what}" for what in report.needlessly_forbidden]
                if report.unpriced:
                    remarks.append(f"{text} sends {report.unpriced} bytes that the planner takes to be free")
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
    """The operators for which the line of torch's tag stands."""
    for target in compat.operators("aten"):
        if torch.Tag.pointwise in target.tags and target not in RULES and not target._schema.is_mutable:
            yield target


def matching(rows: list[tuple[str, str, str]], names: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """The rows of the operators of these names, else whose name contains one; all where there are no names.

    ValueError with the nearest name where there is none.
    """
    found = set() if names else set(rows)
    for part in names:
        exact = {row for row in rows if part in _names(row[0])}
        found |= exact or {row for row in rows if part in row[0]}
        if not exact and not any(part in row[0] for row in rows):
            near = get_close_matches(part, [word for row in rows for word in _names(row[0])], 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"no operator contains {part!r}{hint}")
    return sorted(found)


def _names(operator: str) -> set[str]:
    """What one may call it: `aten.sum.dim_IntList` is also `sum.dim_IntList`, `aten.sum` and `sum`."""
    namespace, *rest = operator.split(".")
    return {operator, ".".join(rest), f"{namespace}.{rest[0]}", rest[0]}


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


def _table(head: list[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in head:
        whole = title in ("operator", *COUNTED)
        table.add_column(title, overflow="fold", no_wrap=whole, justify="right" if title in COUNTED else "left")
    for row in rows:
        table.add_row(*row)
    return table
