"""Second derivatives are refused, not made up."""

from __future__ import annotations

import pytest
import torch

from tutti.nn.glu import glu
from tutti.nn.loss.linear_cross_entropy import linear_cross_entropy
from tutti.nn.rms_norm import rms_norm
from tutti.nn.rotary import rotary

ops = torch.ops.tutti
TOKENS, ONES, UP = torch.tensor([[0], [1], [1], [0]]), torch.ones(4, 1), torch.randn(2, 8, 8)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rms_norm", lambda x, w: rms_norm(x, w[0], 1e-6)),
        ("rotary", lambda x, w: rotary(x, w, w.flip(0))),
        ("glu", glu),
        ("linear_cross_entropy", lambda x, w: linear_cross_entropy(x, w, torch.arange(4))),
        (
            "experts",
            lambda x, w: ops.experts(x, TOKENS, ONES, UP, UP.mT.contiguous(), None, None, "silu", 0, 2, "", -1),
        ),
        (
            "experts",
            lambda x, w: ops.experts_training(
                x, TOKENS, ONES, UP, UP.mT.contiguous(), None, None, "silu", 0, 2, "", -1
            )[0],
        ),
    ],
)
def test_second_derivatives_are_refused(name, function):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    loss = function(x, w).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (alone,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(first.detach(), alone, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match=f"{name} has first derivatives only"):
        first.square().sum().backward()
