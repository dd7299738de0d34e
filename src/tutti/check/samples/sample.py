"""Samples of operators, and how their parts are drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Sample:
    """One call of an operator, with real tensors."""

    target: Any
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)


class Draw:
    """Draws sizes, flags and tensors."""

    def __init__(self, draw: Callable[[st.SearchStrategy], Any]):
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))

    def flag(self) -> bool:
        return self._draw(st.booleans())

    def between(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return self._draw(st.integers(low, high))

    def size(self, options: Sequence[int] = SIZES) -> int:
        return self.pick(options)

    def sizes(self, count: int, options: Sequence[int] = SIZES) -> list[int]:
        return [self.size(options) for _ in range(count)]

    def shape(self, low: int = 1, high: int = 3, options: Sequence[int] = SIZES) -> tuple[int, ...]:
        """A shape of `low` to `high` dims."""
        return tuple(self.sizes(self.between(low, high), options))

    def dtype(self) -> torch.dtype:
        """A dtype for operands that share it, if sums may be accumulated in a wider one."""
        return self.pick([torch.float64, torch.float64, torch.bfloat16])

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers, float64 or float32."""
        dtype = dtype or self.pick([torch.float64, torch.float64, torch.float32])
        return torch.randn(shape, generator=self._generator(), dtype=torch.float64).to(dtype)

    def positive(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Numbers from 0.1 to 1.1."""
        return (torch.rand(shape, generator=self._generator(), dtype=torch.float64) + 0.1).to(dtype)

    def integers(self, *shape: int, below: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, below, shape, generator=self._generator())

    def booleans(self, *shape: int) -> torch.Tensor:
        return self.integers(*shape, below=2).bool()

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.between(0, 999))


SAMPLES: dict[Any, st.SearchStrategy[Sample]] = {}
DEVICES: dict[Any, str] = {}  # the device of operators that do not run on a CPU
FAMILIES: dict[Any, str] = {}  # the family of each operator: the name of the file that draws its calls


def samples(*targets: Any, device: str = "cpu") -> Callable[[Callable], Callable]:
    """Register a function (see the package) as the source of samples of these operators.

    device: the only kind of device with these operators, if not the CPU.
    """

    def register(function: Callable) -> Callable:
        for target in targets:
            assert target not in SAMPLES, f"{target} has samples already"
            SAMPLES[target] = strategy(function, target)
            FAMILIES[target] = function.__module__.rpartition(".")[2]
            if device != "cpu":
                DEVICES[target] = device
        return function

    return register


def strategy(function: Callable, target: Any) -> st.SearchStrategy[Sample]:
    """Samples of one operator."""
    targets = (target,) if len(inspect.signature(function).parameters) > 1 else ()

    @st.composite
    def draw_sample(draw) -> Sample:
        args, kwargs = function(Draw(draw), *targets)
        return Sample(target, tuple(args), kwargs)

    return draw_sample()
