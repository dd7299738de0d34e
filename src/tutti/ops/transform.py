"""Fourier transforms. The transformed dims cannot be split."""

from __future__ import annotations

import torch

from tutti.ir.step_graph import Call
from tutti.ops.registry import rules
from tutti.ops.view import letters

aten = torch.ops.aten


def _transform(node: Call) -> str:
    before = letters(node)
    after = before.copy()
    for dim in node.args[1]:
        at = dim % len(before)
        before[at], after[at] = f"t{at}!", f"f{at}!"
    return f"{' '.join(before)} -> {' '.join(after)} | ~0"


rules(dict.fromkeys([aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default], _transform))
