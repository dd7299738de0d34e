"""Check the command line of a verb before a job of it waits in a queue."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tutti.config.options import call_with_options

NOT_THERE = {"launch": "it submits jobs", "chat": "it needs a terminal", "calibrate": "it measures this machine alone"}


def check_verb(words: Sequence[str], here: bool = True) -> None:
    """Raise ValueError (or SystemExit 2, with the parser's message) for a verb, an option or a file that is wrong.

    here: whether the files are those of this machine, and not those of a container.
    """
    from tutti import cli

    verb, rest = words[0], list(words[1:])
    if verb == "run":
        return _check_script(rest, here)
    cli.check_name(verb)
    if verb in NOT_THERE:
        raise ValueError(f"{verb} cannot be launched: {NOT_THERE[verb]}")
    cli.check_options(verb, rest)
    if verb in CHECKS:
        if here:
            CHECKS[verb](rest)
    elif not cli.VERBS[verb].raw:
        parsed(cli.VERBS[verb].load(), f"tutti {verb}", rest)


def parsed(function: Callable[..., Any], name: str, words: Sequence[str]) -> dict[str, Any]:
    """The arguments that a function would get from a command line."""
    return call_with_options(_recorder(function), name, words)


def _recorder(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A function with the same parameters that returns its arguments."""

    @functools.wraps(function)
    def record(**arguments: Any) -> dict[str, Any]:
        return arguments

    return record


def _check_script(words: Sequence[str], here: bool) -> None:
    if not words or (words[0] == "-m" and len(words) == 1):
        raise ValueError("run needs a script, as in `tutti launch --slurm -- run script.py`")
    if words[0].startswith("-") and words[0] != "-m":
        raise ValueError(f"run {words[0]}: options of `tutti run` are options of `tutti launch`; write only the script")
    if here and words[0] != "-m" and not Path(words[0]).is_file():
        raise ValueError(f"no file {words[0]}")


def _train(words: list[str]) -> None:
    from tutti.train.configfile import parse

    parse(words)


def _align(words: list[str]) -> None:
    from tutti.align.command import command, read

    arguments = parsed(command, "tutti align", words)
    read(arguments["config"], arguments["kind"])


def _rl(words: list[str]) -> None:
    from tutti.rl.command import VERBS, check_verb_options

    verb = words[0] if words else ""
    if verb not in VERBS:
        raise ValueError(f"there is no verb {verb!r} of rl; there are {', '.join(VERBS)}")
    check_verb_options(verb, words[1:])
    arguments = parsed(VERBS[verb], f"tutti rl {verb}", words[1:])
    if verb == "train":
        from tutti.rl.run import RunConfig

        RunConfig.of(arguments["config"])


def _corpus(words: list[str]) -> None:
    from tutti.cli.corpus import run
    from tutti.train.corpus import load_pipeline

    if words[:1] == ["run"]:
        arguments = parsed(run, "tutti corpus run", words[1:])
        if arguments.get("ray"):
            raise ValueError("corpus run --ray gives its tasks to Ray itself; leave --ray out: ranks share the tasks")
        load_pipeline(arguments["config"], out=arguments.get("out"), memory=arguments.get("memory"))


CHECKS: dict[str, Callable[[list[str]], None]] = {"train": _train, "align": _align, "rl": _rl, "corpus": _corpus}
