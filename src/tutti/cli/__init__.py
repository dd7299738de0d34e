"""The command `tutti`: one table of verbs. A verb's module is imported only when it is called."""

import importlib
import json
import os
import re
import select
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tutti
from tutti.config.files import read
from tutti.launch import interrupt
from tutti.launch.launch import Interrupted, LaunchError, is_plain


@dataclass(frozen=True)
class Verb:
    """One subcommand of `tutti`.

    target: `module:function`. Its signature and docstring become the options and the help text. If `raw`, it takes the
    list of arguments instead. An int that it returns is the exit code.
    extra: the optional dependencies it needs, as in `pip install 'tutti[extra]'`.
    reads: whether it reads a model with --model, which is said before anything is imported.
    verbs: its own subcommands. modes: first arguments with options of their own.
    """

    target: str
    summary: str
    raw: bool = False
    extra: str = ""
    reads: bool = False
    verbs: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


VERBS = {
    "train": Verb(
        "tutti.train.command:train", "train a language model as described by a config file", raw=True, extra="train"
    ),
    "eval": Verb(
        "tutti.train.evaluate:evaluate",
        "score a model: loss on held-out text, scores of a task, lm-eval",
        extra="eval",
    ),
    "generate": Verb("tutti.serve.command:generate", "generate text with a trained model", extra="serve"),
    "chat": Verb("tutti.serve.command:chat", "chat with a model in the terminal", extra="serve"),
    "serve": Verb("tutti.serve.command:serve", "serve a model over HTTP, as the OpenAI API does", extra="serve"),
    "bench-serve": Verb("tutti.serve.bench:bench_serve", "load a server and measure what clients see", extra="serve"),
    "rl": Verb(
        "tutti.rl.command:rl",
        "train agents by reinforcement learning, evaluate and watch them",
        raw=True,
        extra="rl",
        verbs=("train", "eval", "play", "list"),
    ),
    "mt": Verb(
        "tutti.cli.mt:mt",
        "magnetotellurics: responses of a section of the earth, inversion of data",
        raw=True,
        extra="science",
        verbs=("forward", "invert"),
    ),
    "md": Verb("tutti.cli.md:md", "molecular dynamics: argon, water, molecules from files", extra="mol"),
    "peptides": Verb(
        "tutti.cli.peptides:peptides",
        "peptides with asked properties: train a language model, generate, evaluate",
        extra="peptides",
    ),
    "export": Verb("tutti.train.export:command", "export a checkpoint as a transformers model", extra="train"),
    "compress": Verb(
        "tutti.cli.compress:command",
        "quantize a model, block by block, so that it is smaller and faster",
        extra="train",
    ),
    "align": Verb(
        "tutti.align.command:command",
        "align a model: fine-tune, train reward models, learn from preferences and rewards",
        extra="train",
    ),
    "corpus": Verb(
        "tutti.cli.corpus:corpus",
        "prepare a corpus: extract, clean, filter, deduplicate; and show what was dropped and why",
        raw=True,
        extra="corpus,train",
        verbs=("run", "show", "steps", "model"),
    ),
    "plan": Verb(
        "tutti.cli.plan.plan:plan",
        "plan for any cluster; explain and compare plans",
        raw=True,
        extra="train",
        reads=True,
        modes=("show", "--compare", "--sweep", "--serve", "--rl", "--align"),
    ),
    "dryrun": Verb("tutti.cli.dryrun:dryrun", "predict the time and memory of a step", extra="train"),
    "diagnose": Verb(
        "tutti.cli.diagnose:diagnose",
        "find slow ranks and links in a run, and show where time goes",
        extra="train",
    ),
    "calibrate": Verb("tutti.cli.calibrate:command", "measure this machine, so that predictions for it are accurate"),
    "rules": Verb("tutti.cli.rules:show_rules", "show and check how each operator can be split", extra="train"),
    "patterns": Verb("tutti.cli.patterns:patterns", "show the fused operators in a model's step", extra="train"),
    "levels": Verb("tutti.cli.levels:show_levels", "show what each level does to a step", extra="train"),
    "checkpoint": Verb("tutti.cli.checkpoint:checkpoint", "show, verify and compare checkpoints", raw=True),
    "reshard": Verb("tutti.cli.checkpoint:reshard", "rewrite a checkpoint for another plan"),
    "run": Verb("tutti.launch.launch:run", "run a script in several processes", raw=True),
    "launch": Verb("tutti.cli.launch:launch", "run a verb on a cluster: Slurm, Ray or Kubernetes", raw=True),
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns the exit code: 0, 1 (a rank failed), 2 (bad input), 128 + signal."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        return _unread(error)


def _unread(error: BrokenPipeError) -> int:
    """The exit code after the reader of stdout closed the pipe, as in `tutti train --help | head`. Raises the error if
    another pipe broke."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
    return 128 + signal.SIGPIPE


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"tutti {tutti.__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    try:
        check_name(name)
    except ValueError as error:
        print(f"tutti: {error}", file=sys.stderr)
        return 2
    if (text := _help(name, rest)) is not None:
        print(wrapped(text, min(100, shutil.get_terminal_size((100, 24)).columns)), end="")
        return 0
    try:
        check_options(name, rest)
        with interrupt.report_interrupt(f"tutti {name}"):
            result = call(name, rest)
    except ModuleNotFoundError as e:
        extra = VERBS[name].extra
        if not extra or (e.name or "tutti").startswith("tutti"):
            raise
        print(f"tutti {name}: there is no package {e.name}; pip install 'tutti[{extra}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Interrupted as e:
        print(f"tutti {name}: {e}", file=sys.stderr)
        return 128 + e.signal
    except LaunchError as e:
        print(f"{'' if e.plain else e.trace}tutti {name}: {e}", file=sys.stderr)
        return e.exit_code
    except (ValueError, OSError, MemoryError) as e:
        if isinstance(e, BrokenPipeError) or not is_plain(e):
            raise
        print(f"tutti {name}: {e}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


def check_name(verb: str) -> None:
    """Raise ValueError for a verb that is not there."""
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, 1)
        raise ValueError(f"no verb {verb!r}; {f'did you mean {near[0]}?' if near else usage()}")


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "usage: tutti VERB ...     (tutti VERB --help says more)\n\n" + "\n".join(lines)


HELP = Path(__file__).parent / "help.json"  # by docs/generate.py, not wrapped: nobody waits for torch to read it


def _help(verb: str, rest: list[str]) -> str | None:
    """What `tutti VERB --help`, or that of a verb of its own, prints; None for anything else."""
    if not rest or rest[-1] not in ("-h", "--help") or not HELP.exists():
        return None
    texts = json.loads(HELP.read_text())
    inner = VERBS[verb].verbs + VERBS[verb].modes
    return texts.get(" ".join([verb, *rest[:-1]])) or (texts.get(f"{verb} {rest[0]}") if rest[0] in inner else None)


def wrapped(text: str, width: int) -> str:
    """Break the lines of a help text. What an option does goes on below its beginning."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"usage: | +(?:\S.*? {2,})?", line)
        indent = " " * min(len(match[0]) if match else 0, width // 2)
        line = re.sub(r"\[[^][]*\]", lambda match: match[0].replace(" ", "\0"), line)  # [--min MIN] stays together
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        ) or [""]
    return "\n".join(lines).replace("\0", " ") + "\n"


def check_options(verb: str, rest: list[str]) -> None:
    """Raise ValueError for an option that is not in the help, but resembles one that is."""
    if verb == "run":  # options of the script follow, and its own parser checks the others
        return
    if verb == "train" and rest and _names_a_task(Path(rest[0])):  # the task says which options there are
        return
    rest = rest[: rest.index("--")] if "--" in rest else rest
    inner = VERBS[verb].verbs + VERBS[verb].modes
    path = [verb, *(word for word in rest[:1] if word in inner)]
    text = _help(path[0], [*path[1:], "--help"])
    options = re.findall(r"--[a-z][\w.-]*", text or "")
    for name in (word.partition("=")[0] for word in rest if text and word.startswith("--")):
        near = get_close_matches(name, options, 1, 0.7)
        if name not in options and near and name.replace("_", "-") not in options:
            raise ValueError(f"no option {name}; did you mean {near[0]}? tutti {' '.join(path)} --help lists all")


def _names_a_task(file: Path) -> bool:
    try:
        return "task" in read(file)
    except ValueError:  # no config: the verb says what is wrong
        return False


def call(name: str, rest: list[str]) -> Any:
    """Call a verb with its arguments."""
    verb = VERBS[name]
    if verb.reads and any(word.partition("=")[0] == "--model" for word in rest):
        print("reading the model", file=sys.stderr, flush=True)
    if verb.raw:
        return verb.load()(rest)
    from tutti.config.options import call_with_options

    return call_with_options(verb.load(), f"tutti {name}", rest)
