"""Graph breaks: where and why TorchDynamo falls back to plain Python, and how to change the code.

TorchDynamo's reasons refer to its internals. `REASONS` rephrases common ones and says what to write instead. For
others, its own first line and hint are used.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

from tutti import compat


@dataclass(frozen=True)
class Break:
    """A line at which a graph ends. whole: its function runs as plain Python from the beginning; functions it calls may
    still be compiled. told: TorchDynamo's own words."""

    file: str
    line: int
    function: str
    source: str
    reason: str
    instead: str
    whole: bool
    told: str

    def __str__(self) -> str:
        rest = f"\n    all of {self.function} runs as plain Python; {WHOLE}" if self.whole else ""
        where = f"{self.file}:{self.line} in {self.function}: {self.source}"
        return f"{where}\n    {self.reason}\n    instead: {self.instead}{rest}"


# A pattern of TorchDynamo's reason: a plain explanation, and what to write instead. The first match counts.
REASONS: list[tuple[str, str, str]] = [
    (r"generator function",
     "it is a generator function: its body is left and entered again between calls",
     "return a list or a stacked tensor; or jit the function that the generator calls, or the one that loops over it"),
    (r"[Dd]ata-dependent (branching|assert)|generic_jump|Assert(ion)? (failed|with)|assert with",
     "Python branches on the value of a tensor (if, while, and, or, not, assert)",
     "torch.where(condition, a, b) computes both and takes one, torch.cond(condition, f, g, (x,)) computes one; an "
     "assert can be left out"),
    (r"Tensor\.(item|tolist|__bool__|__int__|__float__|__index__)|_local_scalar_dense|Data dependent operator",
     "a value of a tensor becomes a Python number (.item(), .tolist(), int(), float())",
     "keep it a 0-d tensor and compute with that; for a log, return it and call .item() outside"),
    (r"Dynamic (shape operator|slicing)|nonzero|masked_select|unique",
     "the shape of a result depends on the values of a tensor (x[mask], nonzero, unique, x[:n] of a tensor n)",
     "keep the shape: torch.where(mask, x, 0) and sums that are weighted by the mask, or topk of a fixed size"),
    (r"RandomState|Random\.|numpy\.random|_C\.Generator|\(Generator\)",
     "random numbers come from a separate generator",
     "draw with torch's default generator (torch.manual_seed), or draw before the call and pass the numbers"),
    (r"numpy|ndarray",
     "numpy computes outside the graph",
     "use the function of torch of the same name; or convert once, before the call"),
    (r"builtin operator `print`|logging\.Logger|Logger|warnings\.warn|reorderable_logging|`print`",
     "it prints or logs, which has to happen at that moment",
     "return what is to be shown and print it outside"),
    (r"backward\(\)|Tensor\.backward|autograd\.grad|run_backward|_engine",
     "gradients are computed there, by autograd itself",
     "nothing: the backward pass of each graph is a graph; or jit the function that returns the loss"),
    (r"_dynamo\.graph_break",
     "the library that is called there asks for a break, as torch's optimizers do around a step",
     "nothing: the step is compiled by itself"),
    (r"compiler\.disable",
     "it calls what is marked with torch.compiler.disable",
     "take the mark away, or call it before or after"),
    (r"Optimizer|optimizer",
     "an optimizer is called there, which is not traced",
     "leave it outside: jit the function that makes the loss"),
    (r"Observed exception|raised? exception|Failed to raise|making fake tensor call|Fake tensor propagation",
     "an exception is raised",
     "check arguments before the call, and catch exceptions outside it"),
    (r"context manager|ContextWrapping",
     "a graph cannot end inside of this `with`, or not follow it",
     "enter it outside of the function, or keep out of it what breaks"),
    (r"hook",
     "a hook is registered or called which cannot be in a graph",
     "register it before the call"),
    (r"marked as skipped|skipped function|Unsupported (function|method) call|builtin operator|__torch_dispatch__",
     "it calls what is not Python that can be followed: a C extension, or a part of a library that is left out",
     "call it before or after; a kernel of one's own becomes part of graphs by torch.library.custom_op"),
    (r"^backend=.* raised",
     "the compiler fails on a graph of it",
     'level="O0" runs it without'),
]  # fmt: skip

WHOLE = "where the break is in a loop, a try or a with, move its body into a separate function, which is then compiled"


def put_into_words(found: compat.GraphBreak) -> Break:
    """A graph break in plain words."""
    said = found.reason.partition("User code traceback")[0].strip()
    first = said.partition("\n")[0]
    text = re.sub(r"\(e\.g\.[^)]*\)", "", f"{first} {_details(said)}")
    fitting = (words for pattern, *words in REASONS if re.search(pattern, text))
    unknown = [f"TorchDynamo does not follow it: {first}", next(iter(_hints(said)), "call it before or after")]
    reason, instead = next(fitting, unknown)
    source = linecache.getline(found.file, found.line).strip()
    return Break(found.file, found.line, found.function, source, reason, instead, found.whole, found.reason)


def _details(reason: str) -> str:
    """The explanation and context of a reason, without its hints."""
    kept = re.findall(r"^\s*(?:Explanation|Developer debug context): (.*)$", reason, re.MULTILINE)
    return " ".join(kept)


def _hints(reason: str) -> list[str]:
    """TorchDynamo's hints, except about its own settings and its development."""
    found = re.findall(r"^\s*Hint: (.*)$", reason, re.MULTILINE)
    return [hint for hint in found if "_dynamo.config" not in hint and "report an issue" not in hint]
