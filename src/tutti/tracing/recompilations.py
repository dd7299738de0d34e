"""Recompilations: which guard of a graph failed, in plain words.

A guard is a property that TorchDynamo assumed for a graph, and checks before each call of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutti import compat


@dataclass(frozen=True)
class Recompilation:
    """A function compiled again, from a line on. guard: TorchDynamo's words. given_up: not compiled, because torch's
    limit (torch._dynamo.config.recompile_limit) is reached: calls that match none of its graphs run as plain Python.
    """

    file: str
    line: int
    function: str
    guard: str
    reason: str
    hint: str
    given_up: bool


# Patterns of guards: a plain explanation, and what to do. The first match counts.
GUARDS: list[tuple[str, str, str]] = [
    (r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
     "{0} had {2} elements along dim {1}, now {3}",
     "nothing to do: along this dim the new graph takes any size"),
    (r"tensor '(.+?)' stride mismatch at index (\d+)",
     "{0} has another stride in dim {1}",
     ".contiguous() before the call, if it changes often"),
    (r"tensor '(.+?)' dtype mismatch\. expected (\S+), actual ([^\s.]+)",
     "{0} was {1}, now {2}",
     "a graph for each dtype; convert before the call, if it need not be so"),
    (r"tensor '(.+?)' rank mismatch\. expected (\d+), actual (\d+)",
     "{0} had {1} dims, now {2}",
     "a graph for each number of dims; reshape before the call, if it need not be so"),
    (r"tensor '(.+?)' requires_grad mismatch",
     "{0} requires a gradient where it did not, or the other way round",
     "a graph for each of both"),
    (r"GLOBAL_STATE changed: (.+)",
     "a setting of torch has changed: {0}",
     "a graph for each setting; as for training and for torch.no_grad()"),
    (r"(\S*\.training)\b",
     "{0} has changed, by train() or eval()",
     "a graph for each of both"),
    (r"len\((.+?)\) == (\d+)",
     "{0} had {1} entries, now another number",
     "a graph for each number, up to torch's limit: a tensor that is stacked or padded has one for any"),
    (r"^(\S+) is (\S+)$",
     "{0} and {1} were the same object, and are no more",
     "a graph for each of both"),
    (r"^not (.+)$",
     "{0} was empty or zero, and is no more",
     "a graph for each of both"),
    (r"(?:got deallocated|invalidated)",
     "an object that the graph was made for is gone",
     "make it once and keep it"),
    (r"(\S+)\.size\(\)\[(\d+)\] == (\S+)\.size\(\)\[(\d+)\]",
     "{0} along dim {1} was as long as {2} along dim {3}, and is no more",
     "nothing to do: in the new graph they may differ"),
    (r"size\(\)\[(\d+)\]",
     "a size is outside of the range that the graph was made for",
     "nothing to do, if it is seldom: 0 and 1 have graphs of their own, and what branches on a size"),
    (r"check_(?:obj|type)_id\((.+?), \d+\)",
     "{0} is another object, or of another type",
     "a graph for each; pass one that stays, or what differs as a tensor"),
    (r"(.+?) == (.+?)$",
     "{0} was {1}, now something else",
     "a graph for each value, up to torch's limit: a tensor has one for all of its values"),
]  # fmt: skip


def put_into_words(found: compat.Recompiled) -> Recompilation:
    """A failed guard in plain words."""
    said = re.sub(r"^\d+/\d+(_\d+)?: ", "", found.guard.partition("\n")[0]).partition("  #")[0].strip()
    fitting = ((fits, *words) for pattern, *words in GUARDS if (fits := re.search(pattern, said)))
    if found_words := next(fitting, None):
        fits, reason, hint = found_words
        reason = reason.format(*map(_plain, fits.groups()))
    else:
        reason, hint = f"its graph was made for something else: {said}", "keep it the same, or make it a tensor"
    return Recompilation(found.file, found.line, found.function, said, reason, hint, found.given_up)


def _plain(source: str) -> str:
    """The name of a variable in the user's code."""
    source = re.sub(r"[LG]\['(\w+)'\]", r"\1", source)
    source = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    return "a value from before the break" if re.match(r"_+stack", source) else source
