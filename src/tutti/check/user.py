"""Rules for users' operators."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tutti.ir.op_info import CONTIGUOUS, LOCAL, RULES, SENDS, Column
from tutti.ops import Cut
from tutti.ops.rule import read

F = TypeVar("F", bound=Callable)


def rule(
    operator: str | Any,
    notation: str,
    *,
    sends: Callable[[Cut], Iterable[tuple[str, int]]] | None = None,
    samples: Callable | None = None,
    check: bool | None = None,
) -> Callable[[F], F]:
    """Register how an operator of `torch.library` can be split, in the notation of `tutti.ops.rule`.

        tutti.rule("mylib::fused_op", "b s d, d e -> b s e")

    A notation with factors marked `@` or `*` needs a local computation, written below the rule. It is called with a
    `LocalContext` (`tutti.lower.local_context`) and the operator's arguments with contiguous local tensors:

        @tutti.rule("mylib::embed", "v* h, b -> b h")
        def embed_own_rows(here: LocalContext, table, ids): ...

    `@tutti.rule(...)` may also stand above the definition of the operator. `torch.library.custom_op` makes an operator
    of any Python function.

    operator: "namespace::name" or "namespace::name.overload", or the overload itself.
    notation: the rule.
    sends: function of a `tutti.ops.registry.Cut` that lists what the local computation sends, as (collective, bytes of
        the operand on a rank). Without it, the planner assumes that it is free.
    samples: a function of a `tutti.check.samples.Draw` that returns (args, kwargs) of a call. By default, calls with
        floats of the shapes in the notation, if the other arguments have defaults.
    check: check the rule on samples now; by default if the environment sets TUTTI_DEBUG=1.

    Raises ValueError if the notation is malformed or contradicts the operator, if the local computation has the wrong
    arguments, or if the operator is unknown or has another rule. Raises AssertionError, with the smallest sample found,
    if a checked rule is wrong. Warns about a rule that was not registered because nothing follows it.
    """
    parsed = read(notation)
    checked = os.environ.get("TUTTI_DEBUG", "0") not in ("", "0") if check is None else check
    if sends is not None and not parsed.local:
        raise ValueError(f"sends=... prices a local computation, but rule {notation!r} marks no factor with @ or *")
    if not parsed.local and _find(operator) is not None:
        _register(_find(operator), notation, None, None, samples, checked)
        return lambda function: function
    return _Waiting(operator, notation, sends, samples, checked)


class _Waiting:
    """A rule that waits for the function below it: a local computation, or the definition of the operator."""

    def __init__(self, operator: str | Any, notation: str, sends, samples, checked: bool):
        self.operator, self.notation, self.options = operator, notation, (sends, samples, checked)
        self.waits = True

    def __call__(self, function: F) -> F:
        self.waits = False
        target = _find(self.operator)
        if target is None:
            raise ValueError(f"there is no operator {self.operator!r}; define it with torch.library.custom_op first")
        local = _computation(function, target, self.notation) if read(self.notation).local else None
        _register(target, self.notation, local, *self.options)
        return function

    def __del__(self):
        if not self.waits:
            return
        target = _find(self.operator)
        why = (
            f"there is no operator {self.operator!r}"
            if target is None
            else f"it marks {_marks(self.notation)}, but no local computation follows it ({_example(target)})"
        )
        warnings.warn(f"rule {self.notation!r} of {self.operator} is not registered: {why}", stacklevel=2)


def _marks(notation: str) -> str:
    return ", ".join(sorted(set(re.findall(r"\w+[@*]", notation.partition("|")[0]))))


def _example(target: Any) -> str:
    return f"def {target._schema.name.split('::')[1]}_of_parts(here, {', '.join(a.name for a in _all(target))}): ..."


def _computation(function: Callable, target: Any, notation: str) -> Callable:
    """The function, after a check of its parameters."""
    if type(function).__module__.startswith("torch."):
        raise ValueError(
            f"rule {notation!r} marks {_marks(notation)}, so it needs the local computation below it, not {target} "
            f"itself: {_example(target)}"
        )
    arguments = [a for a in _all(target) if not a.kwarg_only]
    named = {a.name: None for a in _all(target) if a.kwarg_only}
    for called in (arguments, [a for a in arguments if not a.has_default_value()]):
        try:
            inspect.signature(function).bind("here", *(a.name for a in called), **named)
        except TypeError as error:
            text = ", ".join(["here", *(a.name for a in called), *(f"{key}=..." for key in named)])
            what = getattr(function, "__name__", repr(function))
            raise ValueError(f"{what} cannot compute a part of {target}, called as ({text}): {error}") from None
    return function


def _find(operator: str | Any) -> Any | None:
    """The overload of this name, or None if it does not exist (yet)."""
    if not isinstance(operator, str):
        return operator
    namespace, _, name = operator.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    return packet and getattr(packet, overload or "default", None)


def _register(target: Any, notation: str, local, sends, samples, checked: bool) -> None:
    _agree(target, notation)
    if RULES.get(target, notation) != notation:
        raise ValueError(f"{target} already has the rule {RULES[target]!r}")
    if any(a.alias_info is not None and a.alias_info.is_write for a in _all(target)):
        raise ValueError(f"{target} writes into its arguments; rules are for operators that return new tensors")
    dense = tuple(range(len(read(notation).inputs))) if local is not None else None  # it was traced with dense operands
    tables = (RULES, LOCAL, SENDS, CONTIGUOUS)
    before = [table.get(target) for table in tables]
    for table, value in zip(tables, (notation, local, sends, dense), strict=True):
        _set(table, target, value if value is not None else table.get(target))
    if checked:
        try:
            _prove(target, notation, samples)
        except Exception:
            for table, value in zip(tables, before, strict=True):
                _set(table, target, value)
            raise


def _agree(target: Any, notation: str) -> None:
    """Raise ValueError if a notation cannot be a rule of this operator."""
    parsed = read(notation)
    ins, outs = _all(target), target._schema.returns
    for what, arguments, tensors_of_rule in (("inputs", ins, parsed.inputs), ("outputs", outs, parsed.outputs)):
        tensors = [a for a in arguments if isinstance(a.type, torch.TensorType)]
        many = any("Tensor?" in str(a.type) or "[]" in str(a.type) for a in arguments)
        if len(tensors) != len(tensors_of_rule) and not many:
            raise ValueError(
                f"rule {notation!r} has {len(tensors_of_rule)} {what}, {target} has {len(tensors)} tensors"
            )
    written_factors = {f for dims in parsed.outputs for dim in dims for f in dim}
    read_factors = {f for dims in parsed.inputs for dim in dims for f in dim}
    if unknown := sorted(written_factors - read_factors - parsed.whole - parsed.local):
        name = unknown[0]
        raise ValueError(
            f"rule {notation!r}: factor {name!r} is in no operand, so {target} cannot know its part of it; forbid its "
            f"split with {name}!, or write a local computation and mark it {name}@"
        )


def _set(table: Column, target: Any, value: Any) -> None:
    if value is None:
        table.pop(target, None)
    else:
        table[target] = value


def _all(target: Any) -> list:
    return list(target._schema.arguments)


def _prove(target: Any, notation: str, samples: Callable | None) -> None:
    from tutti.check.machine import prove  # needs hypothesis

    report = prove(target, samples or _by_notation(target, notation))
    if needless := report.needlessly_forbidden:
        raise AssertionError(f"rule {notation!r} of {target} forbids a valid split: {', '.join(needless)}")


def _by_notation(target: Any, notation: str) -> Callable:
    """Calls with tensors of the shapes in the notation."""
    required = [a.name for a in _all(target) if not isinstance(a.type, torch.TensorType) and not a.has_default_value()]
    if required:
        raise ValueError(
            f"{target} needs {', '.join(required)}: pass samples=..., a function that draws (args, kwargs) of a call"
        )
    rule = read(notation)

    def sample(d) -> tuple[tuple, dict]:
        factors = sorted({f for dims in rule.inputs for dim in dims for f in dim})
        sizes = dict(zip(factors, d.sizes(len(factors), (1, 2, 3, 4, 6)), strict=True))
        drawn = replace(rule, sizes=sizes)
        args = tuple(d.floats(*drawn.shape(dims), dtype=torch.float64) for dims in rule.inputs)
        try:
            target(*args)
        except Exception as error:
            shapes = ", ".join(f"float64{list(x.shape)}" for x in args)
            raise ValueError(
                f"{target} rejects operands of the shapes in rule {notation!r}, {shapes} ({error}); if it needs "
                "integers or other sizes, pass samples=..., a function that draws (args, kwargs) of a call"
            ) from error
        return args, {}

    return sample
