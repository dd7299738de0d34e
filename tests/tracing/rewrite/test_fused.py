"""What is left of operators that were written out."""

import torch
from torch import nn

import tutti
from tutti.tracing.rewrite.fused import left_over


class Written(nn.Module):
    def __init__(self, multiplies):
        super().__init__()
        self.up, self.multiplies = nn.Linear(8, 8), multiplies

    def forward(self, x):
        x = self.up(x)
        return (x * torch.erf(x) if self.multiplies else torch.erf(x)).sum()


def test_an_erf_is_a_part_of_an_activation_where_it_is_multiplied():
    for multiplies in (False, True):
        graph = tutti.capture(Written(multiplies), (torch.randn(4, 8),), patterns=())
        assert list(left_over(graph)) == ([("activation", "", "aten.erf")] if multiplies else [])
