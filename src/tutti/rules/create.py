"""Operators that make tensors out of numbers, the random ones included."""

from __future__ import annotations

from string import ascii_lowercase

import torch

import tutti.nn.random  # noqa: F401  (registers tutti::uniform)
from tutti.graph.step_graph import Call
from tutti.rules.registry import ARGUMENTS, LOCAL, operands, rules, specs
from tutti.rules.view import output_shape

aten, ops = torch.ops.aten, torch.ops.tutti


def _anew(mark: str = ""):
    def notation(node: Call) -> str:
        left = ", ".join(
            " ".join(["1" if n == 1 else f"{c}{i}!" for c, n in zip(ascii_lowercase, s, strict=False)])
            for i, s in enumerate(o.meta["val"].shape for o in operands(node))
        )
        right = " ".join(f"{c}{mark}" for c in ascii_lowercase[: len(specs(node)[0].shape)])
        return f"{left} -> {right}"

    return notation


def _triangle(node: Call) -> str:
    """A matrix, or a batch of them, each of which stays whole."""
    *batch, row, column = ascii_lowercase[: len(specs(node)[0].shape)]
    line = " ".join([*batch, f"{row}!", f"{column}!"])
    return f"{line} -> {line} | ~0"


rules(
    {
        aten.full.default: _anew(),
        aten.zeros.default: _anew(),
        aten.ones.default: _anew(),
        aten.empty.memory_format: _anew(),
        aten.new_zeros.default: _anew(),
        aten.new_ones.default: _anew(),
        aten.new_full.default: _anew(),
        aten.scalar_tensor.default: "->",
        aten.arange.default: "-> a!",
        aten.arange.start: "-> a!",
        aten.arange.start_step: "-> a!",
        aten.tril.default: _triangle,
        aten.triu.default: _triangle,
        ops.uniform.default: _anew("@"),
    }
)


ARGUMENTS |= {
    aten.full.default: output_shape(0),
    aten.zeros.default: output_shape(0),
    aten.ones.default: output_shape(0),
    aten.empty.memory_format: output_shape(0),
    aten.new_zeros.default: output_shape(1),
    aten.new_ones.default: output_shape(1),
    aten.new_full.default: output_shape(1),
}


def _uniform(here, seed, step, salt, shape, sizes, strides, offset, **kwargs):
    """The same numbers as the whole tensor has at this rank's positions."""
    sizes, strides, offset = here.output_indices(0)
    return ops.uniform(seed, step, salt, here.output_shape(0), sizes, strides, offset, **kwargs)


LOCAL[ops.uniform.default] = _uniform
