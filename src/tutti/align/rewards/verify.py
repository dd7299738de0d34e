"""Rewards that check what a completion says, without a model.

Each function here makes a reward for `scoring.Rewards`: it takes `completions` and columns of the dataset, and gives a
number for each completion, or None where the column has none. A completion of a conversation is its last message.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tutti.align.rewards import sandbox, schema

Text = Callable[[str], str | None]
FENCED = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or that of the last message."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def plain(text: str) -> str:
    """Text in lower case, without white space around it and with single spaces in it."""
    return " ".join(text.casefold().split())


def number(text: str) -> str:
    """A number in its shortest form, as "1200.5" for "$1,200.50"; other text as `plain`."""
    stripped = text.strip().strip("$%").rstrip(".")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", stripped):  # other commas separate numbers: 3,4 is not 34
        stripped = stripped.replace(",", "")
    if not re.fullmatch(r"[-+]?(\d{1,300}\.?\d{0,300}|\.\d{1,300})", stripped):
        return plain(text)
    whole, _, part = stripped.lstrip("+").partition(".")
    sign, whole, part = "-" if whole[:1] == "-" else "", whole.lstrip("-").lstrip("0") or "0", part.rstrip("0")
    return (sign if whole != "0" or part else "") + whole + ("." + part if part else "")


def boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} of a text; None if there is none that ends."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin, depth = begin + len("\\boxed{"), 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[begin:at]
    return None


def code_of(text: str) -> str:
    """The last fenced block of a text that is of Python or of no language; without one, the text."""
    blocks = [code for language, code in FENCED.findall(text) if language.lower() in ("", "py", "python", "python3")]
    return blocks[-1] if blocks else text


def exact_match(
    column: str = "answer", extract: str | Text | None = None, normalize: Text | None = plain
) -> Callable[..., list[float | None]]:
    """1 for completions that give the answer of the row, otherwise 0.

    extract: what of a completion is the answer: a regular expression, of whose last match the first group (or all of
    it) is taken, or a function such as `boxed`, which gives None for none. None: all of it. normalize: how both are
    written before they are compared, such as `plain` or `number`. A column of lists has several right answers.
    """
    found_in = _extraction(extract)

    def exact_match(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        values = []
        for completion, answer in zip(completions, _column(columns, column), strict=True):
            answers = answer if isinstance(answer, list | tuple) else [answer]
            text = found_in(text_of(completion))
            right = text is not None and any(_written(text, normalize) == _written(x, normalize) for x in answers)
            values.append(None if answer is None else float(right))
        return values

    return exact_match


def regex(pattern: str, full: bool = False, flags: int = re.DOTALL) -> Callable[..., list[float]]:
    """1 for completions in which a regular expression matches (full: which it matches), otherwise 0.

    Patterns with one repetition within another, such as (a+)+, may take forever on some texts.
    """
    compiled = re.compile(pattern, flags)
    matches = compiled.fullmatch if full else compiled.search

    def regex(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(matches(text_of(x)) is not None) for x in completions]

    return regex


def json_schema(
    of: Any = True, column: str | None = None, extract: str | Text | None = None
) -> Callable[..., list[float | None]]:
    """1 for completions that are JSON as a schema says (see `schema`), otherwise 0.

    of: the schema; True: any JSON. column: one with the schema of each row, objects or texts. extract: as that of
    `exact_match`; by default a text in a fenced block is taken out of it. Raises ValueError for an unknown keyword.
    """
    found_in = _extraction(extract or _json_text)
    schema.check(of)

    def json_schema(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        schemas = [of] * len(completions) if column is None else _column(columns, column)
        values: list[float | None] = []
        for completion, each in zip(completions, schemas, strict=True):
            each = json.loads(each) if isinstance(each, str) else each
            if column is not None and each is not None:
                schema.check(each)
            values.append(None if each is None else float(_is_json(found_in(text_of(completion)), each)))
        return values

    return json_schema


class UnitTests:
    """Runs Python code of completions with the tests of their rows, apart: see `sandbox` for what that means.

    counts: how many programs have "passed", "failed", "timeout", "memory" and "error". outcomes: results of the
    programs of the last call; None for a row without tests.
    """

    def __init__(
        self, column: str, partial: bool, extract: str | Text | None, limits: sandbox.Limits | None, most: int
    ):
        self.column, self.partial, self.limits, self.most = column, partial, limits, most
        self.extract = _extraction(extract or code_of)
        self.counts: Counter[str] = Counter()
        self.outcomes: list[sandbox.Outcome | None] = []
        self.__name__ = "unit_tests"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The reward of each completion."""
        programs = list(zip(completions, _column(columns, self.column), strict=True))
        with ThreadPoolExecutor(self.most) as pool:
            self.outcomes = list(pool.map(self._outcome, programs))
        self.counts.update(x.kind for x in self.outcomes if x is not None)
        return [None if x is None else self._reward(x) for x in self.outcomes]

    def measures(self) -> dict[str, float]:
        """The share of each kind of outcome in the last call, for the log."""
        kinds = [x.kind for x in self.outcomes if x is not None]
        return {f"unit_tests/{x}": kinds.count(x) / max(1, len(kinds)) for x in sandbox.KINDS}

    def _outcome(self, program: tuple[Any, Any]) -> sandbox.Outcome | None:
        completion, tests = program
        if not tests:
            return None
        code = self.extract(text_of(completion))
        if not code:
            return sandbox.Outcome(["error"], "there is no code", False)
        return sandbox.run(code, [tests] if isinstance(tests, str) else list(tests), self.limits)

    def _reward(self, outcome: sandbox.Outcome) -> float:
        if self.partial:
            return outcome.kinds.count("passed") / len(outcome.kinds)
        return float(outcome.kind == "passed")


def unit_tests(
    column: str = "tests",
    partial: bool = False,
    extract: str | Text | None = None,
    limits: sandbox.Limits | None = None,
    most: int = 2,
) -> UnitTests:
    """1 for completions whose Python code passes the tests of the row, otherwise 0.

    column: Python code with assertions, or a list of such. partial: give the share of the tests that pass. extract: as
    that of `exact_match`; by default `code_of`. limits: resource limits of a program. most: number of programs
    at once.

    Tests run in the process of the code. Code that sets out to deceive them, say by an object that equals all others,
    can: look at what a model writes once its reward is high.
    """
    return UnitTests(column, partial, extract, limits, most)


def overlong(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13), from tokens n of a completion.

    With L = max_completion_len and c = soft_punish_cache: 0 up to L - c tokens, then (L - c - n) / c, and -1 above L.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(f"soft_punish_cache is {soft_punish_cache}; expected 1 to {max_completion_len}")
    free = max_completion_len - soft_punish_cache

    def overlong(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [min(0.0, max(-1.0, (free - len(x)) / soft_punish_cache)) for x in completion_ids]

    return overlong


def length_penalty(per_token: float) -> Callable[..., list[float]]:
    """-per_token for each token of a completion."""

    def length_penalty(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [-per_token * len(x) for x in completion_ids]

    return length_penalty


def _column(columns: dict[str, Any], name: str) -> Sequence[Any]:
    if name not in columns:
        raise ValueError(f"the dataset has no column {name}; it has {', '.join(sorted(columns))}")
    return columns[name]


def _written(text: Any, normalize: Text | None) -> str | None:
    return str(text) if normalize is None else normalize(str(text))


def _extraction(extract: str | Text | None) -> Text:
    if not isinstance(extract, str):
        return extract or (lambda text: text)
    compiled = re.compile(extract, re.DOTALL)

    def last(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        return matches[-1].group(1 if compiled.groups else 0) if matches else None

    return last


def _json_text(text: str) -> str:
    blocks = [code for language, code in FENCED.findall(text) if language.lower() in ("", "json")]
    return blocks[-1] if blocks else text


def _is_json(text: str | None, of: Any) -> bool:
    def refused(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return text is not None and schema.fits(json.loads(text, parse_constant=refused), of)
    except (ValueError, RecursionError, OverflowError):  # deep nesting, long numbers
        return False
