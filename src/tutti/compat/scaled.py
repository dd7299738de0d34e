"""Products of 8-bit floating-point matrices: torch's private `_scaled_mm`."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(a scale_a) @ (b scale_b) for float8 a (m, k) and b (k, n), scales (m, 1) and (1, n) float32.

    Sums are float32. The kernel wants b in columns, and on a GPU bfloat16 results and sizes that are multiples of 16.
    """
    b = b.t().contiguous().t()
    out = torch.bfloat16 if a.device.type == "cuda" else out_dtype
    return torch._scaled_mm(a.contiguous(), b, scale_a, scale_b, out_dtype=out).to(out_dtype)  # pyright: ignore
