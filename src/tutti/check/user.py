"""Rules for operators that users bring along."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tutti.rules import LOCAL, RULES, SENDS, Cut
from tutti.rules.rule import read

F = TypeVar("F", bound=Callable)


def rule(
    operator: str | Any,
    notation: str,
    *,
    sends: Callable[[Cut], Iterable[tuple[str, int]]] | None = None,
    samples: Callable | None = None,
    check: bool | None = None,
) -> Callable[[F], F]:
    """Say how an operator of `torch.library` can be split, in the notation of `tutti.rules.rule`.

        tutti.rule("mylib::fused_op", "b s d, d e -> b s e")

    A notation with factors marked `@` or `*` needs a computation of its own, which then stands below; it is given a
    `Here` (see `tutti.lower.here`) and the operator's arguments with local tensors:

        @tutti.rule("mylib::embed", "v* h, b -> b h")
        def embed_own_rows(here, table, ids): ...

    Above the operator's own definition, `@tutti.rule(...)` registers both at once. Opaque Python functions become
    operators by `torch.library.custom_op`.

    operator: "namespace::name" or "namespace::name.overload", or the overload itself.
    sends: what the computation of its own exchanges, as (collective, local bytes); without it the planner takes that to
        be free.
    samples: a function of a `Draw` (see `tutti.check.samples`) that returns (args, kwargs) of a call; by default
        tensors of the shapes that the notation says, for operators whose other arguments have defaults.
    check: hold the rule against samples now; by default where the environment sets TUTTI_DEBUG=1.

    Raises ValueError where the notation is malformed or contradicts the operator, or the operator is unknown or has
    another rule; AssertionError, with the smallest sample found, where a checked rule is wrong.
    """
    read(notation)
    checked = os.environ.get("TUTTI_DEBUG", "0") not in ("", "0") if check is None else check
    needs_local = bool(read(notation).local)
    if sends is not None and not needs_local:
        raise ValueError(f"rule {notation!r} has no computation of its own (`@` or `*`), which sends=... would price")
    if not needs_local and _find(operator) is not None:
        _register(_find(operator), notation, None, None, samples, checked)
        return lambda function: function

    def register(function: F) -> F:
        target = _find(operator)
        if target is None:
            raise ValueError(f"there is no operator {operator!r}; define it by torch.library.custom_op first")
        _register(target, notation, function if needs_local else None, sends, samples, checked)
        return function

    return register


def _find(operator: str | Any) -> Any | None:
    """The overload of this name; None where there is none (yet)."""
    if not isinstance(operator, str):
        return operator
    namespace, _, name = operator.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    return packet and getattr(packet, overload or "default", None)


def _register(target: Any, notation: str, local, sends, samples, checked: bool) -> None:
    tensors = [a for a in target._schema.arguments if isinstance(a.type, torch.TensorType)]
    given = len(read(notation).inputs)
    if len(tensors) != given and not any("Tensor?" in str(a.type) or "[]" in str(a.type) for a in _all(target)):
        raise ValueError(f"rule {notation!r} has {given} inputs, {target} has {len(tensors)} tensors")
    if RULES.get(target, notation) != notation:
        raise ValueError(f"{target} has the rule {RULES[target]!r} already")
    if any(a.alias_info is not None and a.alias_info.is_write for a in _all(target)):
        raise ValueError(f"{target} writes into its arguments; rules are for operators that return what they make")
    tables: tuple[dict, ...] = (RULES, LOCAL, SENDS)
    before = [table.get(target) for table in tables]
    for table, value in zip(tables, (notation, local, sends), strict=True):
        _set(table, target, value if value is not None else table.get(target))
    if checked:
        try:
            _prove(target, notation, samples)
        except Exception:
            for table, value in zip(tables, before, strict=True):
                _set(table, target, value)
            raise


def _set(table: dict, target: Any, value: Any) -> None:
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
        raise AssertionError(f"rule {notation!r} of {target} forbids what is right: {', '.join(needless)}")


def _by_notation(target: Any, notation: str) -> Callable:
    """Calls with tensors of the shapes that the notation says."""
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
        return tuple(d.floats(*drawn.shape(dims), dtype=torch.float64) for dims in rule.inputs), {}

    return sample
