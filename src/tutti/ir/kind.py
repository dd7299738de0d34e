"""Kinds of the inputs and outputs of a graph, which are named `kind:path`. `ir.step_graph` says what each kind is."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """Kinds with a meaning of their own. Each tensor of an optimizer's state has another kind, such as `exp_avg`."""

    PARAM = "param"
    BUFFER = "buffer"
    MASTER = "master"
    CACHE = "cache"
    BATCH = "batch"
    COMMON = "common"
    CONSTANT = "constant"
    LR = "lr"
    STEP = "step"
    SEED = "seed"
    COUNT = "count"
    GRAD = "grad"
    WRITTEN = "written"
    VALUE = "value"
    OUTPUT = "output"
    METRIC = "metric"
    CHECK = "check"

    def at(self, path: object) -> str:
        """The name of what has this kind and a path: `Kind.PARAM.at("fc.weight") == "param:fc.weight"`."""
        return f"{self.value}:{path}"


NUMBERS = (Kind.LR, Kind.STEP, Kind.COUNT, Kind.SEED)  # inputs that are single numbers
CALL_INPUTS = (Kind.BATCH, Kind.COMMON, Kind.CONSTANT, *NUMBERS)  # inputs that change with each call


def split_name(name: str) -> tuple[str, str]:
    """(kind, path) of a name or label. The path of a name such as `step` is empty."""
    kind, _, path = name.partition(":")
    return kind, path


def kind_of(name: str) -> str:
    """The kind of a name or label. It compares equal to members of `Kind`."""
    return name.partition(":")[0]


def path_of(name: str) -> str:
    """The path of a name or label."""
    return name.partition(":")[2]
