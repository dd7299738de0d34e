"""A model is read, never changed."""

from __future__ import annotations

import torch
from torch import nn

import tutti


class Freezes(nn.Module):
    """Takes its dropout out of training by itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        self.dropout.eval()
        return self.dropout(self.linear(x)).sum()


def test_modules_train_or_not_as_they_did():
    model, batch = Freezes().train(), (torch.randn(2, 4),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.parallelize(model, optimizer, batch, cluster="cpu:1", level="O0")
    assert all(module.training for module in model.modules())
    step.evaluate(batch)
    assert all(module.training for module in model.modules())
