"""Levels change how a Program runs, not what it computes."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import tutti
import zoo
from cases import slow
from tutti.compile import segment_calls
from tutti.nn import MoE


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5)) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def losses(level: str, plan: str = "single", cluster: str = "cpu:1") -> list[float]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)
    step = tutti.parallelize(model, optimizer, batch, loss=loss, level=level, plan=plan, cluster=cluster, clip_norm=0.5)
    return [step(batch).item() for _ in range(4)]


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.starts
def test_compiled_equals_operator_by_operator(level):
    assert losses(level) == pytest.approx(losses("O0"), rel=1e-5)


@needs_compiler
@pytest.mark.parametrize(("make", "level"), [slow(zoo.llama, "O2"), slow(zoo.gpt2, "O1"), (zoo.gpt2, "O2")])
@pytest.mark.starts
def test_weights_are_read_before_they_are_written_over(make, level):
    """Updates that go early lie between what reads the weights, at times through views that other functions make."""

    def trained(level: str) -> list[float]:
        model, batch = make(2), zoo.tokens(2)
        step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), batch, cluster="cpu:1",
                                 plan="single", level=level)  # fmt: skip
        return [step(batch).item() for _ in range(4)]

    assert trained(level) == pytest.approx(trained("O0"), rel=1e-4)


@needs_compiler
@pytest.mark.starts
def test_experts_are_compiled_around():
    """Their forward pass returns a workspace for the backward pass, and segments read its first output."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.before, self.experts, self.after = nn.LayerNorm(8), MoE(8, 12, 4, 2), nn.LayerNorm(8)

        def forward(self, x):
            return self.after(x + self.experts(self.before(x))[0]).relu()

    def trained(level: str) -> list[float]:
        model, generator = Experts(), torch.Generator().manual_seed(1)
        batch = torch.randn(2, 6, 8, generator=generator), torch.randn(2, 6, 8, generator=generator)
        step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss=loss, level=level)
        return [step(batch).item() for _ in range(3)]

    assert trained("O1") == pytest.approx(trained("O0"), rel=1e-5)


@needs_compiler
@pytest.mark.starts
def test_segments_are_compiled_once_for_all_ranks():
    before = len(segment_calls.COMPILED)
    assert losses("O2", "dp2", "cpu:2") == pytest.approx(losses("O0"), rel=1e-5)
    compiled = len(segment_calls.COMPILED) - before
    assert losses("O2", "dp2", "cpu:2") == pytest.approx(losses("O0"), rel=1e-5)
    assert len(segment_calls.COMPILED) - before == compiled


def test_without_a_compiler_it_runs_and_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="level O2 needs a C\\+\\+ compiler"):
        assert losses("O2") == losses("O0")
