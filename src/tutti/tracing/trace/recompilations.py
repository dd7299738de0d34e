"""Recompilations: which guard of a graph failed, in plain words.

A guard is a property that TorchDynamo assumed when it compiled a graph. It is checked before each call of the graph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti import compat


@dataclass(frozen=True)
class Recompilation:
    """A function that was compiled again, starting at a line.

    guard: TorchDynamo's own message.
    given_up: it was not compiled, because torch's limit (torch._dynamo.config.recompile_limit) is reached. Calls that
        match none of its graphs run as plain Python.
    """

    file: str
    line: int
    function: str
    guard: str
    reason: str
    hint: str
    given_up: bool


# Pattern of guards, explanation, and what to do. The first match counts.
GUARDS: list[tuple[str, str, str]] = [
    (r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
     "{0} had {2} elements along dim {1}, now {3}",
     "nothing to do: the new graph takes any size along this dim"),
    (r"tensor '(.+?)' stride mismatch at index (\d+)",
     "{0} has another stride in dim {1}",
     ".contiguous() before the call, if it changes often"),
    (r"tensor '(.+?)' dtype mismatch\. expected (\S+), actual ([^\s.]+)",
     "{0} was {1}, now {2}",
     "one graph per dtype; convert before the call, if the dtypes need not differ"),
    (r"tensor '(.+?)' rank mismatch\. expected (\d+), actual (\d+)",
     "{0} had {1} dims, now {2}",
     "one graph per number of dims; reshape before the call, if they need not differ"),
    (r"tensor '(.+?)' requires_grad mismatch",
     "{0} now requires a gradient and did not before, or vice versa",
     "one graph for each"),
    (r"GLOBAL_STATE changed: (.+)",
     "a setting of torch has changed: {0}",
     "one graph per setting, as for training and for torch.no_grad()"),
    (r"(\S*\.training)\b",
     "{0} has changed, by train() or eval()",
     "one graph for each"),
    (r"len\((.+?)\) == (\d+)",
     "{0} had {1} entries, now another number",
     "one graph per number, up to torch's limit; a stacked or padded tensor needs one graph for all"),
    (r"^(\S+) is (\S+)$",
     "{0} and {1} were the same object, and no longer are",
     "one graph for each case"),
    (r"^not (.+)$",
     "{0} was empty or zero, and no longer is",
     "one graph for each case"),
    (r"(?:got deallocated|invalidated)",
     "an object that the graph was compiled for was deleted",
     "create it once and keep it"),
    (r"(\S+)\.size\(\)\[(\d+)\] == (\S+)\.size\(\)\[(\d+)\]",
     "{0} along dim {1} was as long as {2} along dim {3}, and no longer is",
     "nothing to do: the new graph allows different sizes"),
    (r"size\(\)\[(\d+)\]",
     "a size is outside of the range that the graph was compiled for",
     "nothing to do, if it is rare: sizes 0 and 1, and branches on a size, have graphs of their own"),
    (r"check_(?:obj|type)_id\((.+?), \d+\)",
     "{0} is another object, or has another type",
     "one graph for each; pass the same object, or pass what differs as a tensor"),
    (r"(.+?) == (.+?)$",
     "{0} was {1}, now something else",
     "one graph per value, up to torch's limit; a tensor needs one graph for all values"),
]  # fmt: skip


def put_into_words(failure: compat.Recompiled) -> Recompilation:
    """Explain a failed guard in plain words."""
    said = re.sub(r"^\d+/\d+(_\d+)?: ", "", failure.guard.partition("\n")[0]).partition("  #")[0].strip()
    fitting = ((fits, *words) for pattern, *words in GUARDS if (fits := re.search(pattern, said)))
    if match := next(fitting, None):
        fits, reason, hint = match
        reason = reason.format(*map(_plain, fits.groups()))
    else:
        reason, hint = f"a guard of its graph failed: {said}", "keep the value constant, or make it a tensor"
    return Recompilation(failure.file, failure.line, failure.function, said, reason, hint, failure.given_up)


def _plain(source: str) -> str:
    """The name of a variable in the user's code."""
    source = re.sub(r"[LG]\['(\w+)'\]", r"\1", source)
    source = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    return "a value from before the break" if re.match(r"_+stack", source) else source
