"""Every rule is right: calls drawn at random, split in every way that their rule allows, give what the whole gives.

And none is needlessly strict: what a rule forbids is tried too, and must fail or give other numbers. `make test` draws
few calls of each operator and splits each line of its rule once over two devices. `make proofs` draws many, splits them
in every way, and writes what was proven into docs/rules.md and the pages of docs/rules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import models
import tutti
from cases import slow
from tutti.check.machine import RuleReport, _Call, prove
from tutti.check.samples.sample import DEVICES, FAMILIES, SAMPLES, Sample
from tutti.cli.rules import name, notation
from tutti.ir.op_info import LOCAL, RULES
from tutti.ops import rule_of
from tutti.plan.layouts.choice import candidates, legal

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {  # name of the page -> its title, families of operators
    "elementwise": ("Elementwise operators", ("pointwise",)),
    "made": ("Tensors that are created, drawn or updated", ("create", "draw", "update")),
    "products": (
        "Products and linear algebra", ("matmul", "linear_rows", "grouped", "linalg", "assignment")
    ),
    "transformers": (
        "Attention, norms, losses and experts",
        ("attention", "attention_cuda", "paged", "norm", "fused", "softmax", "loss", "embedding", "bag", "experts",
         "slots", "recurrent"),
    ),
    "reductions": ("Reductions, scans and sorting", ("reduction", "scan", "sort", "statistic")),
    "shapes": ("Shapes and indices", ("view", "slice", "roll", "window", "index", "scatter")),
    "images": ("Images and signals", ("convolution", "planes", "pool", "resample", "transform")),
}  # fmt: skip
NOTE = "Written by `make proofs` (tests/proofs/test_rules.py), not by hand."
COLUMNS = ("operator", "rule", "local computation", "split cases")
FIRST, FEW, MANY = 2, 2, 10  # calls of each operator
aten, ops = torch.ops.aten, torch.ops.tutti

CREATED = "its numbers are made from their positions"
WHOLE: dict[Any, str] = {
    aten.scalar_tensor.default: "one number",
    aten.arange.default: CREATED,
    aten.arange.start: CREATED,
    aten.arange.start_step: CREATED,
    aten.linspace.default: CREATED,
    aten.eye.default: CREATED,
    aten.eye.m: CREATED,
    aten.tril_indices.default: CREATED,
    aten.triu_indices.default: CREATED,
    aten.median.default: "one number of all",
    aten.nanmedian.default: "one number of all",
    aten._pdist_forward.default: "each pair of points has a distance",
    torch.ops.tutti.linear_sum_assignment.default: "which column a row gets depends on all costs",
}
"""Operators that cannot be split, and why."""

UNREAD = (
    r"operand 0 as a partial sum|splitting \w0",
    "of the operand only the dtype is read: nobody would move it for that",
)
NEEDLESS: dict[Any, tuple[str, str]] = {
    aten._scaled_dot_product_efficient_attention.default: (
        "splitting e",
        "the width of values alone, with queries and keys whole: no layout of a model asks for it",
    ),
    aten.new_zeros.default: UNREAD,
    aten.new_empty.default: UNREAD,
    aten.new_empty_strided.default: UNREAD,
    ops.round_stochastically.default: (
        "operand 0 as a partial sum",
        "parts would be rounded one by one: right on average, and other bits than the whole's",
    ),
    ops.round_to_nearest.default: (
        "operand 0 as a partial sum",
        "parts would be rounded one by one: other bits than the whole's",
    ),
}
"""What (a pattern) is forbidden though it would be right, and why."""


def needless(target: Any, report: RuleReport) -> list[str]:
    """What a rule forbids without a reason that is known."""
    pattern = NEEDLESS.get(target, ("", ""))[0]
    return [what for what in report.needlessly_forbidden if not re.fullmatch(pattern, what)]


def is_pointwise(target: Any) -> bool:
    """Whether the line of torch's tag stands for this operator."""
    return target not in RULES and torch.Tag.pointwise in getattr(target, "tags", ())


def is_here(target: Any) -> bool:
    """Whether this machine has the device that an operator runs on."""
    return DEVICES.get(target, "cpu") == "cpu" or torch.cuda.is_available()


def is_ours(target: Any) -> bool:
    """Not an operator that another test has brought along."""
    return getattr(target, "namespace", "") in ("aten", "tutti")


TARGETS = sorted(filter(is_ours, {*RULES, *SAMPLES}), key=str)
LONG = re.compile(r"aten\.(_?linalg_\w+|lu_unpack|upsample_bi\w+)\b")  # proven by `make proofs` alone
CASES = [
    (slow if examples > FEW or LONG.match(name(target)) else pytest.param)(
        target, examples, id=f"{name(target)}-{examples}"
    )
    for examples in (FEW, MANY)
    for target in TARGETS
]

SPLIT = [target for target in TARGETS if target in RULES and target not in WHOLE and is_here(target)]
SPLIT.append(aten.exp.default)  # for those with torch's tag


@pytest.fixture(scope="module")
def proven() -> dict[Any, RuleReport]:
    """What the longer proofs of this run have found, by operator."""
    return {}


@pytest.fixture(scope="module")
def operators() -> Callable[[str], list]:
    """The operators of a model's step (forward, backward and update with AdamW and clipping), one for each call."""
    by_model: dict[str, list] = {}

    def of(model_name: str) -> list:
        if model_name not in by_model:
            model, batch, loss = models.case(model_name)
            update = torch.optim.AdamW(model.parameters())
            graph = tutti.capture(model, batch, update, loss=loss, clip_norm=1.0)
            by_model[model_name] = [n.target for n in graph.calls if isinstance(n.target, torch._ops.OpOverload)]
        return by_model[model_name]

    return of


@pytest.mark.parametrize("target", SPLIT, ids=name)
def test_each_line_is_split_over_two_devices(target):
    """In the first calls each factor, pair of factors and sum of each line; in later ones factors that are new."""
    mesh, samples, tried, report = {"a": 2}, 0, set(), RuleReport()

    def split(sample: Sample) -> None:
        nonlocal samples
        samples += 1
        call = _Call(sample)
        rule = rule_of(call.node)
        if rule is None:
            return
        for choice in candidates(rule, {}, 2):
            case = (rule.notation if samples <= FIRST else "", choice)
            if case not in tried and legal(rule, {"a": choice}, mesh):
                call.compare(rule, mesh, {"a": choice})
                call.compare_price(rule, mesh, {"a": choice}, report)
                tried.update({case, ("", choice)})

    for examples in (FIRST, MANY):
        if not tried or (examples == MANY and target in LOCAL):
            drawn = settings(
                max_examples=examples, derandomize=True, database=None, print_blob=False,
                report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            )  # fmt: skip
            drawn(given(SAMPLES[target])(split))()
    assert tried, "no call could be split"
    assert report.unpriced == 0, "bytes are sent that the planner takes to be free: SENDS says nothing of them"


@pytest.mark.parametrize(("target", "examples"), CASES)
def test_parts_give_the_whole(target, examples, proven):
    assert target in RULES or is_pointwise(target), "there are samples of an operator without a rule"
    assert target in SAMPLES, "there is a rule without samples: tutti.check.samples says how to draw calls"
    if not is_here(target):
        pytest.skip(f"it runs on {DEVICES[target]} only")
    report = prove(target, SAMPLES[target], examples)
    if examples < MANY and (not report.cases or needless(target, report)):
        report = prove(target, SAMPLES[target], MANY)  # a few calls may have had nothing to split, or been lucky
    assert (report.cases == 0) == (target in WHOLE), f"{report.cases} split cases"
    assert needless(target, report) == []
    assert report.unpriced == 0, "bytes are sent that the planner takes to be free: SENDS says nothing of them"
    if examples == MANY:
        assert target not in NEEDLESS or report.needlessly_forbidden != []
        proven[target] = report


@pytest.mark.parametrize("model_name", models.MODELS)
def test_every_operator_of_every_model_is_proven(model_name, operators):
    targets = set(operators(model_name))
    assert {name(t) for t in targets if t not in RULES and not is_pointwise(t)} == set(), "there is no rule"
    assert {name(t) for t in targets if t not in SAMPLES} == set(), "there are no samples"


def family(target: Any) -> str:
    """The page of an operator."""
    for page, (_, families) in PAGES.items():
        if FAMILIES[target] in families:
            return page
    raise ValueError(f"the samples in check/samples/{FAMILIES[target]}.py are on no page: add the file to PAGES")


def pages(proven: dict[Any, RuleReport], operators: Callable[[str], list]) -> dict[str, str]:
    """What was proven: pages in Markdown, by their path in docs."""
    rows = {t: (f"`{name(t)}`", _line(t, r), "yes" if t in LOCAL else "", _cases(t, r)) for t, r in proven.items()}
    counts = [(m, len(set(operators(m))), len(operators(m))) for m in models.MODELS]
    samples, cases = (sum(getattr(r, what) for r in proven.values()) for what in ("samples", "cases"))
    forbidden = sum(sum(r.strict.values()) for r in proven.values())
    summary = (
        f"{len(rows)} operators have a rule, {sum(t in LOCAL for t in proven)} of them with a local computation "
        f"for split factors. {samples:,} random calls were split in {cases:,} ways that the rules allow. The "
        f"joined parts equaled the whole each time. {forbidden:,} forbidden splits were tried, too: each "
        f"failed or gave other numbers. {len(counts)} models use no operator without a proven rule."
    )
    return written(rows, counts, summary)


def written(rows: dict[Any, tuple], counts: list[tuple], summary: str) -> dict[str, str]:
    """The pages of rows of operators. counts: number of operators, by model."""
    own = {page: sorted(row for t, row in rows.items() if family(t) == page) for page in PAGES}
    listed = [(f"[{title}](rules/{page}.md)", len(own[page])) for page, (title, _) in PAGES.items()]
    contents = {
        "rules.md": [
            "# Operators that can be split\n",
            f"{NOTE}\n",
            f"{summary}\n",
            "[Add an operator rule](extend/operator.md) explains the notation. `tutti rules --check` proves rules "
            "again, `tutti rules mm` shows one.\n",
            *_table(("page", "rules"), listed),
            "",
            "A training step of each model (forward, backward, clipping and AdamW), tiny:\n",
            *_table(("model", "operators", "calls"), counts),
            "",
        ]
    }
    for page, (title, _) in PAGES.items():
        head = f"# {title}\n", f"{NOTE} [Operators that can be split](../rules.md) explains the table.\n"
        contents[f"rules/{page}.md"] = [*head, *_table(COLUMNS, own[page]), ""]
    return {path: "\n".join(lines) for path, lines in contents.items()}


def _line(target: Any, report: RuleReport) -> str:
    """The line itself; of lines that are written for the arguments of a call, one that is not too long."""
    if target not in RULES:
        return "elementwise, by torch's tag"
    if isinstance(RULES[target], str):
        return f"`{notation(RULES[target])}`"
    if not report.lines:
        return notation(RULES[target])
    short = [line for line in report.lines if len(line) <= 80] or [min(report.lines, key=len)]
    return f"by its arguments, as `{max(short, key=lambda line: (len(line), line))}`"


def _cases(target: Any, report: RuleReport) -> str:
    if not is_here(target):
        return f"on {DEVICES[target]} only"
    return f"none: {WHOLE[target]}" if target in WHOLE else str(report.cases)


def _table(head: tuple[str, ...], rows: list[tuple]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


@pytest.mark.slow
def test_the_pages_are_written(proven, operators):
    reports = {t: proven.get(t) or RuleReport() for t in TARGETS if t in proven or not is_here(t)}
    if missing := [name(t) for t in TARGETS if t not in reports]:
        pytest.skip(f"{len(missing)} operators were not proven in this run: {', '.join(missing[:3])}, ...")
    assert {t for m in models.MODELS for t in operators(m)} <= set(reports)
    for path, text in pages(reports, operators).items():
        (DOCS / path).write_text(text)


def test_the_pages_list_the_operators_and_the_models_that_there_are():
    text = "".join((DOCS / path).read_text() for path in ("rules.md", *(f"rules/{page}.md" for page in PAGES)))
    rows = re.findall(r"^\| `?([\w.]+)`? \|", text, re.MULTILINE)
    listed = [row for row in rows if row not in ("operator", "model", "page")]
    assert sorted(listed) == sorted([*map(name, TARGETS), *models.MODELS]), "`make proofs` writes it anew"


def test_the_pages_show_what_was_proven():
    reports = {
        aten.mm.default: RuleReport(samples=3, cases=41),
        aten.exp.default: RuleReport(samples=2, cases=1000),
        aten._softmax.default: RuleReport(strict=Counter(left=2)),
        aten.sum.default: RuleReport(
            lines=Counter({"a:sum -> | ~0": 3, "a:sum b:sum -> | ~0": 1, f"{'a ' * 50}->": 9})
        ),
        aten.scalar_tensor.default: RuleReport(samples=1),
    }
    texts = pages(reports, lambda model_name: [aten.mm.default, aten.mm.default, aten.t.default])
    assert "| `aten.mm` |" in texts["rules/products.md"] and "| `aten.mm` |" not in texts["rules/reductions.md"]
    assert "| [Products and linear algebra](rules/products.md) | 1 |" in texts["rules.md"]
    text = "".join(texts.values())
    assert "| `aten.sum` | by its arguments, as `a:sum b:sum -> \\| ~0` |  | 0 |" in text
    assert "5 operators have a rule, 1 of them with a local computation for split factors" in text
    assert "6 random calls were split in 1,041 ways" in text and " 2 forbidden splits were tried" in text
    assert "| `aten.mm` | `m k, k n -> m n \\| ~0 ~1` |  | 41 |" in text
    assert "| `aten.exp` | elementwise, by torch's tag |  | 1000 |" in text
    assert "| `aten._softmax` | by its arguments (tutti.ops.reductions.softmax) | yes | 0 |" in text
    assert "| `aten.scalar_tensor` | `->` |  | none: one number |" in text
    assert "| gpt2 | 2 | 3 |" in text and f"{len(models.MODELS)} models use no operator" in text
