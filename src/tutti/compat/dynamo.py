"""TorchDynamo: graph breaks, recompilations, and what it runs as Python."""

from __future__ import annotations

import importlib
import logging
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import fx

# Settings of TorchDynamo that preserve the behaviour of plain Python.
AS_PYTHON: dict[str, Any] = {
    "suppress_errors": True,  # code that cannot be traced runs as plain Python
    "skip_nnmodule_hook_guards": False,  # hooks may change between calls
    "trace_numpy": False,  # keep numpy's numerics and random numbers
    "rewrite_assert_with_torch_assert": False,  # AssertionError, not RuntimeError
    "allow_unspec_int_on_nn_module": True,  # a module may have a counter
}

LIMIT = "recompile limit exceeded"  # in TorchDynamo's reason


@dataclass(frozen=True)
class GraphBreak:
    """Where TorchDynamo left the graph, in the innermost user frame. whole: it gave up the function."""

    reason: str
    file: str
    line: int
    function: str
    whole: bool = False


@dataclass(frozen=True)
class Recompiled:
    """A function that TorchDynamo compiled again, and the guard that failed. given_up: not compiled, as its limit of
    graphs is reached."""

    guard: str
    file: str
    line: int
    function: str
    given_up: bool


def split_by_dynamo(function: Callable, backend: Callable, dynamic: bool | None) -> Callable:
    """`torch.compile`, with graphs that other calls of it neither share nor count, if torch supports that."""
    alone: Any = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    return torch.compile(function, backend=backend, dynamic=dynamic, **alone)


def as_python() -> Any:
    """A context in which TorchDynamo compiles with AS_PYTHON."""
    from torch._dynamo import config

    return config.patch(AS_PYTHON)


def inductor(graph: fx.GraphModule, inputs: list) -> Callable:
    """Compile a TorchDynamo graph and its backward pass; random numbers equal eager mode's."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches={"fallback_random": True})  # pyright: ignore[reportReturnType]


def compilations() -> tuple[Any, int]:
    """The current position in TorchDynamo's log of compilations."""
    from torch._dynamo import output_graph, utils

    frames = utils._compilation_metrics
    return frames[-1] if frames else None, len(output_graph.graph_break_reasons)  # pyright: ignore


def compiled_since(place: tuple[Any, int]) -> tuple[list[GraphBreak], list[Recompiled]]:
    """The entries of that log since a position, without functions of torch and Python's library; at most 64."""
    from torch._dynamo import output_graph, utils

    last, count = place
    frames = list(takewhile(lambda frame: frame is not last, reversed(utils._compilation_metrics)))[::-1]
    reasons = output_graph.graph_break_reasons  # pyright: ignore
    stacks = [(broken, _innermost(broken.user_stack)) for broken in reasons[count if count <= len(reasons) else 0 :]]
    breaks = [GraphBreak(broken.reason, *place) for broken, place in stacks if place]
    again = []
    for frame in frames:
        given_up = LIMIT in (frame.fail_reason or "")
        file, line, name = _begin(frame)
        if _is_librarys(file):
            continue
        if frame.fail_type not in (None, "SkipFrame") and not given_up:
            at = frame.fail_user_frame_filename or file, frame.fail_user_frame_lineno or line
            at = (file, line) if _is_librarys(at[0]) else at
            breaks.append(GraphBreak(frame.fail_reason or str(frame.fail_type), *at, name, whole=True))
        if frame.recompile_reason:
            again.append(Recompiled(frame.recompile_reason, file, line, name, given_up))
    return breaks, again


def _begin(frame: Any) -> tuple[str, int, str]:
    """File, line and name of a function in the log. Functions that are given up have no name: use an earlier entry with
    the same id ("3/8": the eighth graph of function 3)."""
    from torch._dynamo import utils

    if frame.co_name is None:
        same = f"{(frame.compile_id or '').partition('/')[0]}/"
        named = (f for f in reversed(utils._compilation_metrics) if f.co_name and (f.compile_id or "").startswith(same))
        frame = next(named, frame)
    return frame.co_filename or "?", frame.co_firstlineno or 0, function_of(frame.co_name or "?")


def function_of(name: str) -> str:
    """The name of a function in the source, also for its continuation after a graph break."""
    return re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", name)


def _innermost(stack: list) -> tuple[str, int, str] | None:
    frame = next((frame for frame in reversed(stack) if not _is_librarys(frame.filename)), None)
    return (frame.filename, frame.lineno or 0, function_of(frame.name)) if frame else None


def _is_librarys(file: str) -> bool:
    """Whether a file is torch's or Python's: its breaks are reported at the line that calls it."""
    torchs, pythons = str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")
    return file.startswith(torchs) or (file.startswith(pythons) and "site-packages" not in file)


@contextmanager
def no_warnings_of_compilation() -> Iterator[None]:
    """Suppress warnings of torch's compiler about itself, not those of user code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._(dynamo|inductor|subclasses|functorch)")
        warnings.filterwarnings("ignore", message=r"\s*((Torch)?Dynamo|`torch.jit)")
        yield


def quiet_compiler(when: Callable[[], bool]) -> None:
    """Suppress log messages of torch's compiler while `when()`."""
    parts = ("torch._dynamo", "torch._inductor", "torch._subclasses", "torch.fx")
    importlib.import_module("torch._dynamo")  # makes the loggers

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or not record.name.startswith(parts) or not when()

    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            for handler in logger.handlers:
                handler.addFilter(passes)
