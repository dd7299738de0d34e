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
    """A line at which a graph ends.

    whole: the function runs as plain Python from the beginning. Functions it calls may still be compiled.
    message: TorchDynamo's own message.
    """

    file: str
    line: int
    function: str
    source: str
    reason: str
    instead: str
    whole: bool
    message: str

    def __str__(self) -> str:
        rest = f"\n    all of {self.function} runs as plain Python; {WHOLE}" if self.whole else ""
        where = f"{self.file}:{self.line} in {self.function}: {self.source}"
        return f"{where}\n    {self.reason}\n    instead: {self.instead}{rest}"


# Pattern of TorchDynamo's reason, explanation, and what to write instead. The first match counts.
REASONS: list[tuple[str, str, str]] = [
    (r"generator function",
     "it is a generator function: Python leaves and re-enters its body between calls",
     "return a list or a stacked tensor; or jit the function that the generator calls, or the one that loops over it"),
    (r"[Dd]ata-dependent (branching|assert)|generic_jump|Assert(ion)? (failed|with)|assert with",
     "Python branches on the value of a tensor (if, while, and, or, not, assert)",
     "torch.where(condition, a, b) computes both and takes one, torch.cond(condition, f, g, (x,)) computes one; an "
     "assert can be omitted"),
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
     "it prints or logs, which must happen at that moment",
     "return the values and print them outside"),
    (r"backward\(\)|Tensor\.backward|autograd\.grad|run_backward|_engine",
     "autograd computes gradients there",
     "nothing: the backward pass of each graph is a graph; or jit the function that returns the loss"),
    (r"_dynamo\.graph_break",
     "the library that is called there requests a break, as torch's optimizers do around a step",
     "nothing: the step is compiled separately"),
    (r"compiler\.disable",
     "it calls a function that is marked with torch.compiler.disable",
     "remove the mark, or call it before or after"),
    (r"Optimizer|optimizer",
     "it calls an optimizer, which is not traced",
     "leave it outside: jit the function that computes the loss"),
    (r"Observed exception|raised? exception|Failed to raise|making fake tensor call|Fake tensor propagation",
     "an exception is raised",
     "check arguments before the call, and catch exceptions outside it"),
    (r"context manager|ContextWrapping",
     "a graph cannot end inside of this `with`, or cannot trace it",
     "enter it outside of the function, or move the code that breaks out of it"),
    (r"hook",
     "it registers or calls a hook that cannot be in a graph",
     "register it before the call"),
    (r"marked as skipped|skipped function|Unsupported (function|method) call|builtin operator|__torch_dispatch__",
     "it calls code that TorchDynamo cannot trace: a C extension, or a part of a library that it skips",
     "call it before or after; torch.library.custom_op makes a custom kernel part of graphs"),
    (r"^backend=.* raised",
     "the compiler fails on one of its graphs",
     'level="O0" runs it without the compiler'),
]  # fmt: skip

WHOLE = "if the break is in a loop, a try or a with, move its body into a separate function, which is then compiled"


def put_into_words(graph_break: compat.GraphBreak) -> Break:
    """Explain a graph break in plain words."""
    said = graph_break.reason.partition("User code traceback")[0].strip()
    first = said.partition("\n")[0]
    text = re.sub(r"\(e\.g\.[^)]*\)", "", f"{first} {_details(said)}")
    fitting = (words for pattern, *words in REASONS if re.search(pattern, text))
    unknown = [f"TorchDynamo does not trace it: {first}", next(iter(_hints(said)), "call it before or after")]
    reason, instead = next(fitting, unknown)
    source = linecache.getline(graph_break.file, graph_break.line).strip()
    return Break(
        graph_break.file,
        graph_break.line,
        graph_break.function,
        source,
        reason,
        instead,
        graph_break.whole,
        graph_break.reason,
    )


def _details(reason: str) -> str:
    """Return the explanation and context of a reason, without its hints."""
    details = re.findall(r"^\s*(?:Explanation|Developer debug context): (.*)$", reason, re.MULTILINE)
    return " ".join(details)


def _hints(reason: str) -> list[str]:
    """Return TorchDynamo's hints, except those about its own settings and its development."""
    hints = re.findall(r"^\s*Hint: (.*)$", reason, re.MULTILINE)
    return [hint for hint in hints if "_dynamo.config" not in hint and "report an issue" not in hint]
