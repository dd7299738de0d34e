"""Gradients through time: a loop over time that `torch.func.grad` can differentiate in compiled programs too.

    states = unroll(step, weights, state, xs)   # states[t] = step(weights, states[t - 1], *(x[t] for x in xs))

`tutti.scan` alone has a backward pass for `Tensor.backward` only. Here both directions are scans: the backward pass
computes each step again from the state before it, and adds up the gradients of the weights. First-order gradients only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tutti
from tutti.nn.quantized.stored import stored

Step = Callable[..., Tensor]


# Operands of a compiled scan must not share memory, as parameters of one vector of weights do: they are `stored` first.


def unroll(step: Step, weights: tuple[Tensor, ...], state: Tensor, xs: tuple[Tensor, ...]) -> Tensor:
    """States after each step, (time, *state.shape).

    step: a pure function of (weights, state, *a row of each of xs). Tensors are floats, and the state keeps its shape.
    """
    return _Unroll.apply(step, len(weights), state, *weights, *xs)  # pyright: ignore[reportReturnType]


class _Unroll(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(step: Step, count: int, state: Tensor, *tensors: Tensor) -> Tensor:
        weights, xs = tuple(map(stored, tensors[:count])), tuple(map(stored, tensors[count:]))

        def body(state: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            state = step(weights, state, *x)
            return state, state

        return tutti.scan(body, stored(state), xs)[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.step, ctx.count = inputs[:2]
        ctx.save_for_backward(output, *inputs[2:])

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        states, state, *tensors = ctx.saved_tensors
        before = torch.cat([state.unsqueeze(0), states[:-1]])
        # A function of its own: its forward pass gets plain tensors, which `tutti.scan` can capture.
        return None, None, *_Back.apply(ctx.step, ctx.count, gradient[0], before, *tensors)  # pyright: ignore


class _Back(torch.autograd.Function):
    """The gradients of the first state, of the weights and of xs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(step: Step, count: int, gradient: Tensor, before: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, xs = tuple(map(stored, tensors[:count])), tuple(map(stored, tensors[count:]))

        def body(carry: tuple[Tensor, tuple[Tensor, ...]], now: tuple):
            later, sums = carry
            gradient, state, *x = now
            pull = torch.func.vjp(step, weights, state, *x)[1]
            of_weights, of_state, *of_x = pull(later + gradient)
            return (of_state, tuple(a + b for a, b in zip(sums, of_weights, strict=True))), tuple(of_x)

        start = torch.zeros_like(before[0]), tuple(torch.zeros_like(w) for w in weights)
        (first, sums), of_xs = tutti.scan(body, start, (gradient, before, *xs), reverse=True)
        return first, *sums, *of_xs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError("tutti.rl.core.through_time.unroll has first-order gradients only")
