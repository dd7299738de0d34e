"""Fused attention on a GPU, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples
from tutti.ops.attention_cuda import BACKWARD, FORWARD

FLASH, EFFICIENT, CUDNN = FORWARD


def drawn(d: Draw, device: str):
    """q, k, v, whether causal."""
    shape = d.pick([1, 2, 4]), d.pick([2, 4, 6]), 64, 64
    q, k, v = (d.floats(*shape, dtype=torch.float32).to(device, torch.bfloat16) for _ in range(3))
    return q, k, v, d.flag()


def call(target, q, k, v, causal) -> tuple:
    """The arguments of a forward operator."""
    return (q, k, v, 0.0, causal) if target is FLASH else (q, k, v, None, True, 0.0, causal)


def backward_call(target, grad, q, k, v, causal, made: tuple) -> tuple:
    """The arguments of a backward operator; made: what the forward operator returned."""
    if target is BACKWARD[1]:
        out, sums, seed, offset = made
        return grad, q, k, v, None, out, sums, seed, offset, 0.0, [True, True, True, False], causal
    out, sums, cum_q, cum_k, max_q, max_k, seed, offset, _ = made
    if target is BACKWARD[0]:
        return grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
    return grad, q, k, v, out, sums, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal


@samples(*FORWARD, device="cuda")
def attention(d: Draw, target):
    return call(target, *drawn(d, "cuda")), {}


@samples(*BACKWARD, device="cuda")
def attention_backward(d: Draw, target):
    q, k, v, causal = drawn(d, "cuda")
    forward = FORWARD[BACKWARD.index(target)]
    made = forward(*call(forward, q, k, v, causal))
    return backward_call(target, torch.ones_like(made[0]), q, k, v, causal, made), {}
