"""The cross-entropy of a block of logits on a GPU, and its gradients, in one Triton kernel: see
`tutti.nn.loss.linear_cross_entropy`.

A program has a row. It reads the logits twice and writes them once; operator by operator they are passed over 20 times,
in float32.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

DTYPES = torch.float32, torch.bfloat16, torch.float16
ELEMENTS = 8192  # of a row, at once


@triton.jit
def _differentiate(logits, labels, grad_lse, grad_picked, lse, picked, classes, row_stride, ELEMENTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    at = tl.arange(0, ELEMENTS)
    dtype: tl.constexpr = logits.dtype.element_ty
    label = tl.load(labels + row)
    of_label = tl.load(logits + label, mask=(label >= 0) & (label < classes), other=0.0).to(tl.float32)
    most = tl.full([ELEMENTS], -3.4028234663852886e38, tl.float32)  # finite: inf - inf is no number
    total = tl.zeros([ELEMENTS], tl.float32)
    for start in range(0, classes, ELEMENTS):
        x = tl.load(logits + start + at, mask=start + at < classes, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, x)
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    highest = tl.max(most, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
    tl.store(lse + row, log_sum)
    tl.store(picked + row, of_label)
    by_lse, by_picked = tl.load(grad_lse + row), tl.load(grad_picked + row)
    for start in range(0, classes, ELEMENTS):
        here = start + at < classes
        x = tl.load(logits + start + at, mask=here, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_sum) * by_lse
        gradient += tl.where(start + at == label, by_picked, 0.0)
        tl.store(logits + start + at, gradient.to(dtype), mask=here)


def differentiate(
    logits: Tensor, labels: Tensor, grad_lse: Tensor, grad_picked: Tensor, lse: Tensor, picked: Tensor
) -> None:
    """Replace logits by their gradients, and write lse and picked.

    logits: (t, v) of one of DTYPES, with contiguous rows. labels: (t) int64. The others: (t) float32, contiguous.
    """
    elements = min(ELEMENTS, triton.next_power_of_2(logits.shape[1]))
    _differentiate[(len(logits),)](  # pyright: ignore[reportIndexIssue]
        logits, labels, grad_lse, grad_picked, lse, picked, logits.shape[1], logits.stride(0), elements, num_warps=16
    )  # fmt: skip
