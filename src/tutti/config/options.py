"""Options of verbs: `tyro` reads them from the signature and the docstring of a function."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def call_with_options(function: Callable[..., Any], name: str, words: Sequence[str]) -> Any:
    """Call a function with the options of a command line. name: what the help calls the command.

    Raises SystemExit: 2 for options that are wrong, 0 after --help. Raises ValueError for an option of several values
    that has none.
    """
    import tyro

    _refuse_empty(function, words)
    return tyro.cli(_documented(function), prog=name, args=list(words))


def call_verb(verbs: Mapping[str, Callable[..., Any]], name: str, description: str, words: Sequence[str]) -> Any:
    """Call the function that the first word names, with the options that follow. Raises as above."""
    import tyro

    if words and words[0] in verbs:
        _refuse_empty(verbs[words[0]], words[1:])
    functions = {verb: _documented(function) for verb, function in verbs.items()}
    return tyro.extras.subcommand_cli_from_dict(functions, prog=name, description=description, args=list(words))


def _refuse_empty(function: Callable[..., Any], words: Sequence[str]) -> None:
    """Raise ValueError for an option of several values that has none, as after an empty variable of the shell."""
    if "--help" in words or "-h" in words:
        return
    several = {name for name, parameter in inspect.signature(function).parameters.items() if parameter.default == ()}
    for word, following in itertools.pairwise([*words, "--"]):
        if word.startswith("--") and word[2:].replace("-", "_") in several and following.startswith("--"):
            raise ValueError(f"{word} has no value; is a variable of the shell empty?")


def _documented(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its docstring changed by `whole_lines`, because `tyro` prints the line breaks of a parameter."""
    documented = function.func if isinstance(function, functools.partial) else function
    documented.__doc__ = whole_lines(documented.__doc__ or "")
    return function


def whole_lines(docstring: str) -> str:
    """Join the lines of each paragraph and of each parameter. Indented examples keep their lines."""
    lines: list[str] = []
    in_args = False
    for line in inspect.cleandoc(docstring).splitlines():
        before = lines[-1] if lines else ""
        in_args = line == "Args:" or (in_args and (not line or line.startswith(" ")))
        joins_text = before and line and not before.startswith(" ") and not re.match(r" |[-*] |\d+\. ", line)
        if joins_text or (in_args and before.startswith("    ") and line.startswith(" " * 8)):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)
