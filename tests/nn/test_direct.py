"""What a Program calls directly gives what the operator gives, also for tensors that are none."""

import torch

from tutti import compat
from tutti.nn.direct import DIRECT

ops = torch.ops.tutti


def test_as_the_operator():
    linear = DIRECT[ops.linear_rows.default]
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(linear(x, weight, None), ops.linear_rows(x, weight, None))
    assert torch.equal(linear(x.double(), weight.double(), None), x.double() @ weight.double().T)


def test_of_fake_tensors():
    with compat.fake_mode():
        x, weight = torch.empty(3, 8), torch.empty(5, 8)
        assert DIRECT[ops.linear_rows.default](x, weight, None).shape == (3, 5)
