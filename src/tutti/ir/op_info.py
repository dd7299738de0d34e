"""OpInfo: the properties of an operator besides its kernel.

The table has a row for each operator and a column for each property. The modules of `tutti.ops`, one for each
family of operators, fill it: `FLOPS[target] = formula` sets `OPS[target].flops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class OpInfo:
    """The row of an operator. None stands for the default.

    rule: how the operator can be split, in factor notation, or a function of the call that returns it (`ops.rule`).
    arguments: (arguments, local output shapes) -> the arguments of a rank.
    local: computes the local outputs, if a rank needs more than the operator itself on its local operands. Called with
        a `LocalContext` and the arguments.
    uneven: whether `local` also computes parts that differ in size between ranks.
    dense: operands whose last dim the kernel reads as contiguous memory without a check.
    contiguous: operands whose strides the kernel ignores or refuses.
    by_token: operands (batch, heads, tokens, width) that the kernel reads as contiguous in the order (batch, tokens,
        heads, width), whatever their strides.
        In these three, negative positions count from the last operand, where optional ones come before.
    sends: what `local` communicates, for a `Cut`.
    work: (call, factor, outer, k) -> how much more than the mean the busiest of k ranks computes.
    flops: floating-point operations of a call; a multiply-add counts two. Only of matrix products and attention: plans
        split these, and their rate is that of the peak.
    seconds: (device, local call) -> seconds, if shapes and bytes alone do not determine them.
    workspace: bytes that the kernel allocates on a CPU while it runs, for an event of `analysis.replay`.
    """

    rule: Any = None
    arguments: Callable[..., tuple] | None = None
    local: Callable[..., Any] | None = None
    uneven: bool | None = None
    dense: tuple[int, ...] | None = None
    contiguous: tuple[int, ...] | None = None
    by_token: tuple[int, ...] | None = None
    sends: Callable[..., Any] | None = None
    work: Callable[..., float] | None = None
    flops: Callable[[Any], int] | None = None
    seconds: Callable[..., float] | None = None
    workspace: Callable[[Any], int] | None = None


OPS: dict[Any, OpInfo] = {}


class Column(MutableMapping[Any, Any]):
    """One field of all operators that have it, by operator."""

    def __init__(self, field: str):
        assert field in {f.name for f in fields(OpInfo)}
        self.field = field

    def __getitem__(self, target: Any) -> Any:
        value = getattr(OPS[target], self.field)
        if value is None:
            raise KeyError(target)
        return value

    def __setitem__(self, target: Any, value: Any) -> None:
        setattr(OPS.setdefault(target, OpInfo()), self.field, value)

    def __delitem__(self, target: Any) -> None:
        self[target]  # KeyError if there is none
        setattr(OPS[target], self.field, None)

    def __contains__(self, target: object) -> bool:
        return target in OPS and getattr(OPS[target], self.field) is not None

    def __iter__(self) -> Iterator[Any]:
        return (target for target in list(OPS) if target in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __ior__(self, other: Any) -> Column:
        self.update(other)
        return self


RULES, ARGUMENTS, LOCAL, DENSE, CONTIGUOUS = map(Column, ("rule", "arguments", "local", "dense", "contiguous"))
SENDS, WORK, FLOPS, SECONDS, WORKSPACE = map(Column, ("sends", "work", "flops", "seconds", "workspace"))
UNEVEN, BY_TOKEN = Column("uneven"), Column("by_token")
