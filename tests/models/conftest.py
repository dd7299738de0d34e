"""A few steps of a model on one device, and under plans for two virtual devices."""

from __future__ import annotations

import copy

import pytest
import torch

import tutti


def losses(model, batch, cluster=None, plan=None, steps=4):
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if plan is not None:
        step = tutti.parallelize(model, optimizer, batch, cluster=cluster, plan=plan, level="O0")
        return torch.stack([step(batch) for _ in range(steps)])
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
    return torch.stack(history)


@pytest.fixture
def trains_alike():
    """`trains_alike(model, batch)`: losses fall, and dp2 and tp2 have those of plain PyTorch."""

    def check(model, batch, plans=("dp2", "tp2")):
        alone = losses(model, batch)
        assert alone[-1] < alone[0]
        for plan in plans:
            torch.testing.assert_close(losses(model, batch, "cpu:2", plan), alone, rtol=2e-5, atol=1e-6)

    return check


@pytest.fixture
def comes_back(tmp_path):
    """`comes_back(model, batch, load)`: a saved model that is loaded again has the same outputs."""

    def check(model, batch, load):
        model.eval().save_pretrained(tmp_path / "saved")
        again = load(tmp_path / "saved").eval()
        with torch.no_grad():
            torch.testing.assert_close(again(**batch).to_tuple(), model(**batch).to_tuple())
        return again

    return check
