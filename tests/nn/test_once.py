"""Second derivatives are refused, not made up."""

from __future__ import annotations

import pytest
import torch

from tutti.nn.glu import glu
from tutti.nn.linear_cross_entropy import linear_cross_entropy
from tutti.nn.rms_norm import rms_norm
from tutti.nn.rotary import rotary


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rms_norm", lambda x, w: rms_norm(x, w[0], 1e-6)),
        ("rotary", lambda x, w: rotary(x, w, w.flip(0))),
        ("glu", glu),
        ("linear_cross_entropy", lambda x, w: linear_cross_entropy(x, w, torch.arange(4))),
    ],
)
def test_second_derivatives_are_refused(name, function):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    loss = function(x, w).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (alone,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(first.detach(), alone, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match=f"{name} has no second derivatives"):
        first.square().sum().backward()
