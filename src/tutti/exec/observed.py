"""What a step returns besides its loss and state: metrics, and checks of values in the model's Python code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tutti.ir.kind import Kind, kind_of, split_name

HOW = ("mean", "sum", "gather")


class CheckFailed(RuntimeError):
    """A check in the model's forward pass fails for the values of a step."""


class Observed:
    """The metrics and checks of one batch, microbatch by microbatch.

    how: by metric, "mean" or "sum" over microbatches, or "gather" (concatenate along dim 0). By default 0-d metrics are
    averaged and others gathered.
    """

    def __init__(self, how: Mapping[str, str]):
        self.how = how
        self.metrics: dict[str, list[torch.Tensor]] = {}
        self.failed: dict[str, torch.Tensor] = {}

    def take(self, outputs: dict[str, torch.Tensor]) -> None:
        """Remove metrics and checks from the outputs of a microbatch, and keep them."""
        for name in [name for name in outputs if is_observed(name)]:
            self.keep(name, outputs.pop(name))

    def keep(self, name: str, value: torch.Tensor) -> None:
        kind, key = split_name(name)
        if kind == Kind.METRIC:
            self.metrics.setdefault(key, []).append(value)
        else:
            self.failed[name] = self.failed[name] + value if name in self.failed else value

    def check(self, messages: Mapping[str, str], what: str) -> None:
        """Raise CheckFailed if one of the checks failed. messages: by output name."""
        for name, count in self.failed.items():
            if float(count) != 0:
                raise CheckFailed(f"{what}: {messages.get(name, name)}")

    def combined(self) -> dict[str, torch.Tensor]:
        """The metrics of the whole batch, by name."""
        return {name: combine(values, self.how.get(name)) for name, values in self.metrics.items()}


def combine(values: list[torch.Tensor], how: str | None) -> torch.Tensor:
    how = how or ("gather" if values[0].ndim else "mean")
    if how == "gather":
        return torch.cat(values) if values[0].ndim else torch.stack(values)
    total = torch.stack(values).sum(0)
    return total / len(values) if how == "mean" else total


def how_to_combine(metrics: Mapping[str, str] | Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """How some metrics are combined, and the names of all. Raises ValueError for an unknown mode."""
    if isinstance(metrics, str):
        raise ValueError(f"metrics is {metrics!r}; give a list of names, or a mapping of names to {', '.join(HOW)}")
    how = dict(metrics) if isinstance(metrics, Mapping) else {}
    if unknown := [(name, way) for name, way in how.items() if way not in HOW]:
        raise ValueError(f"metric {unknown[0][0]!r} is combined by {unknown[0][1]!r}; it may be {', '.join(HOW)}")
    return how, tuple(metrics)


def is_observed(name: str) -> bool:
    return kind_of(name) in (Kind.CHECK, Kind.METRIC)
