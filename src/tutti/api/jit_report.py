"""The report of `tutti.jit` on a function: graphs, breaks and recompilations, as data and (`str`) as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from tutti import compat
from tutti.tracing.trace.breaks import Break
from tutti.tracing.trace.recompilations import Recompilation

GIVEN_UP = "; torch's limit of graphs is reached, and what fits none of them runs as plain Python"
MOST = 6  # kinds of operators that are named of a graph


@dataclass(frozen=True)
class Graph:
    """A compiled graph. file, line, function: place of its first operator in the source, or "?" and 0. operators: how
    often each is called. dynamic: whether some size is symbolic."""

    file: str
    line: int
    function: str
    operators: dict[str, int]
    dynamic: bool

    @classmethod
    def of(cls, graph: fx.GraphModule) -> Graph:
        calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        traces = (node.meta.get("stack_trace") or "" for node in calls)
        file, line, function = next(filter(None, map(_innermost, traces)), ("?", 0, "?"))
        named = Counter(_name(node) for node in calls)
        symbols = any("SymInt" in str(node.meta.get("type") or type(node.meta.get("example_value")))
                      for node in graph.graph.nodes if node.op == "placeholder")  # fmt: skip
        return cls(file, line, function, dict(named.most_common()), symbols)

    def __str__(self) -> str:
        kinds = [f"{name} x {count}" if count > 1 else name for name, count in self.operators.items()]
        more = f" and {len(kinds) - MOST} kinds more" if len(kinds) > MOST else ""
        sizes = ", for any size" if self.dynamic else ""
        operators = f"{_count(sum(self.operators.values()), 'operator')}: {', '.join(kinds[:MOST])}{more}"
        return f"{self.file}:{self.line} in {self.function}: {operators}{sizes}"


@dataclass(frozen=True)
class JitReport:
    """The graphs, breaks and recompilations of `name` so far, in order."""

    name: str
    level: str
    graphs: tuple[Graph, ...]
    breaks: tuple[Break, ...]
    recompilations: tuple[Recompilation, ...]

    def __str__(self) -> str:
        operators = sum(sum(graph.operators.values()) for graph in self.graphs)
        counts = f"{_count(len(self.graphs), 'graph')} of {_count(operators, 'operator')}"
        counts += f", {_count(len(self.breaks), 'break')}, {_count(len(self.recompilations), 'recompilation')}"
        parts = {"graphs": map(str, self.graphs), "breaks": map(str, self.breaks), "recompilations": self._again()}
        lines = [f"{self.name}, level {self.level}: {counts}"]
        for title, texts in parts.items():
            if indented := [f"  {line}" for text in texts for line in text.splitlines()]:
                lines += ["", title, *indented]
        return "\n".join(lines)

    def _again(self) -> Iterator[str]:
        """A text for each recompiled function. A hint that several guards share appears once."""
        functions = groupby(self.recompilations, lambda again: (again.file, again.line, again.function))
        for (file, line, function), recompilations in functions:
            lines = [f"{file}:{line} in {function}"]
            for hint, alike in groupby(recompilations, lambda again: again.hint):
                for again in alike:
                    lines.append(f"    {again.reason}{GIVEN_UP if again.given_up else ''}")
                lines.append(f"    {hint}")
            yield "\n".join(lines)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _innermost(trace: str) -> tuple[str, int, str] | None:
    """The last line of a stack trace."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', trace)
    return (frames[-1][0], int(frames[-1][1]), compat.function_of(frames[-1][2])) if frames else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
