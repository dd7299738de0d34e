"""Fused attention on a GPU, forward and backward."""

import torch

from tutti.check.samples.sample import Draw, samples
from tutti.ops.attention.attention_cuda import BACKWARD, FORWARD

FLASH, EFFICIENT, CUDNN = FORWARD


LENGTH, WIDTH = 128, 64


def drawn(d: Draw, target, device: str):
    """q, k, v, a bias or None, whether causal; for a forward operator."""
    dtype = d.pick([torch.bfloat16, torch.float16])
    batch, groups = d.pick([1, 2, 4]), d.pick([2, 4, 6])
    heads = groups * (1 if target is EFFICIENT else d.pick([1, 2]))  # its kernel knows no groups

    def floats(*shape: int) -> torch.Tensor:
        return d.floats(*shape, dtype=torch.float32).to(device, dtype)

    q = floats(batch, heads, LENGTH, WIDTH)
    k, v = (floats(batch, groups, LENGTH, WIDTH) for _ in range(2))
    bias = floats(batch, heads, LENGTH, LENGTH) if target is EFFICIENT and d.flag() else None
    return q, k, v, bias, bias is None and d.flag()


def call(target, q, k, v, bias, causal) -> tuple:
    """The arguments of a forward operator."""
    return (q, k, v, 0.0, causal) if target is FLASH else (q, k, v, bias, True, 0.0, causal)


def backward_call(target, grad, q, k, v, bias, causal, outputs: tuple) -> tuple:
    """The arguments of a backward operator; made: what the forward operator returned."""
    if target is BACKWARD[1]:
        out, sums, seed, offset = outputs
        return grad, q, k, v, bias, out, sums, seed, offset, 0.0, [True, True, True, False], causal
    out, sums, cum_q, cum_k, max_q, max_k, seed, offset, _ = outputs
    if target is BACKWARD[0]:
        return grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
    return grad, q, k, v, out, sums, seed, offset, bias, cum_q, cum_k, max_q, max_k, 0.0, causal


@samples(*FORWARD, device="cuda")
def attention(d: Draw, target):
    return call(target, *drawn(d, target, "cuda")), {}


@samples(*BACKWARD, device="cuda")
def attention_backward(d: Draw, target):
    forward = FORWARD[BACKWARD.index(target)]
    q, k, v, bias, causal = drawn(d, forward, "cuda")
    outputs = forward(*call(forward, q, k, v, bias, causal))
    grad = d.floats(*outputs[0].shape, dtype=torch.float32).to(outputs[0])
    return backward_call(target, grad, q, k, v, bias, causal, outputs), {}
