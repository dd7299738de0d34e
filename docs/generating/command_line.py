"""The command line: a page for each verb, and a list of them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
from typing import Any

from generating.page import NOTE, table


def help_of(verb: str, *inner: str) -> str:
    """`tutti VERB --help`, without boxes, colors and line breaks: `cli.wrapped` makes them."""
    from tutti import cli

    out = io.StringIO()
    before = {key: os.environ.get(key) for key in ("COLUMNS", "NO_COLOR", "TERM")}
    os.environ |= {"COLUMNS": "129", "NO_COLOR": "1", "TERM": "dumb"}
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.call(verb, [*inner, "--help"])
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)
    return plain(out.getvalue())


@functools.cache
def helps() -> dict[str, str]:
    """The help of every verb, and of its subcommands and modes, by what is typed before --help."""
    from tutti import cli

    return {" ".join([name, *inner]): help_of(name, *inner) for name, verb in cli.VERBS.items()
            for inner in ([], *([x] for x in (*verb.verbs, *verb.modes)))}  # fmt: skip


def plain(text: str) -> str:
    """Text in boxes as indented text."""
    lines = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        if match := re.match(r"\u256d\u2500 (.*?) \u2500", line):
            lines.append(f"{match[1]}:")
        elif line.startswith("\u2502"):
            inner = line.strip("\u2502").rstrip()
            lines += [] if set(inner.strip()) <= {"\u2500"} else ["  " + inner.removeprefix(" ")]
        elif len(line) > 20 and set(line.strip()) == {"-"}:  # a box of a terminal without Unicode
            lines[-1] = lines[-1].strip() if lines[-1].endswith(".") else f"{lines[-1].strip()}:"
        elif not line.startswith("\u2570"):
            at = len(line) - len(line.lstrip())
            is_description = at > 7 and lines and lines[-1][at - 2 : at] == "  " and lines[-1][at : at + 1].strip()
            goes_on = is_description or (at > 0 and lines and lines[-1].startswith("usage:"))
            lines[-1:] = [f"{lines[-1]} {line.strip()}"] if goes_on else [*lines[-1:], line.rstrip()]
    return "\n".join(lines).replace("\u2022", "-").strip() + "\n"


def index() -> str:
    """The list of verbs."""
    from tutti import cli

    rows = [(f"[`tutti {name}`](cli/{name}.md)", verb.summary) for name, verb in cli.VERBS.items()]
    return (
        f"{NOTE}\n# Command line\n\n"
        "Every verb prints its options with `--help`. Exit codes: 0 for success, 1 if a rank or a check failed, 2 for "
        "bad input, 128 plus the signal number if a signal ended the command ([all of them](errors.md)).\n\n"
        + table(("verb", "what it does"), rows)
    )


def page(name: str) -> str:
    """The page of a verb: its help, and that of its subcommands and modes."""
    from tutti import cli

    own = {key: text for key, text in helps().items() if key.split()[0] == name}
    parts = [f"{NOTE}\n# tutti {name}\n\n{sentence(cli.VERBS[name].summary)}\n"]
    for key, text in own.items():
        parts.append(f"\n## tutti {key}\n" if len(own) > 1 else "")
        parts.append(f"\n```text\n{cli.wrapped(text, 100)}```\n")
    parts.append(mt_config() if name == "mt" else "")
    return "".join(parts)


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def mt_config() -> str:
    """The keys of a config of `tutti mt`."""
    from tutti.science.em.mt.config import MTConfig
    from tutti.science.em.mt.keys import sections

    def row(key) -> str:
        default = "required" if key.required else value_of(key.default)
        cells = f"`{key.name}`", key.type, key.unit, default, key.meaning
        return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n"

    head = "\n| key | type | unit | default | meaning |\n|---|---|---|---|---|\n"
    parts = ["\n## The config of tutti mt\n\n`runs/mt_example.toml` has every key, with comments.\n"]
    for heading, meaning, keys in sections(MTConfig):
        parts.append(f"\n### `{heading}`\n\n{meaning}\n" if heading else "")
        parts.append(head + "".join(map(row, keys)))
    return "".join(parts)


def value_of(default: Any) -> str:
    """As TOML writes it."""
    if default is None or default == ():
        return ""
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f"`{json.dumps(default) if isinstance(default, str | bool) else default}`"
