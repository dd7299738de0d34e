"""bfloat16 parameters and optimizer state without masters: rounded alike under every plan, and as good for learning.

The model's gradients are sixteenths, exact in whatever order they are added, so that plans may differ in nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
from cases import slow

STEPS = 4


class Net(nn.Module):
    """A table and a matrix, whose gradients count."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(32, 64, generator=generator).to(torch.bfloat16))
        self.matrix = nn.Parameter(torch.randn(64, 64, generator=generator).to(torch.bfloat16))

    def forward(self, ids, x):
        rows = nn.functional.embedding(ids, self.table).float().sum() + nn.functional.linear(x, self.matrix).sum()
        return rows / len(ids)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (16,), generator=generator)
    return {"ids": ids, "x": torch.randint(-2, 3, (16, 64), generator=generator).to(torch.bfloat16)}


def make(plan: str, devices: int, **options) -> tutti.Step:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"level": "O0", "stochastic_rounding": True} | options
    return tutti.parallelize(model, optimizer, batch(0), cluster=f"cpu:{devices}", plan=plan, **options)


def trained(step: tutti.Step) -> dict[str, torch.Tensor]:
    for i in range(STEPS):
        step(batch(i))
    return step.training_state()


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return trained(make("single", 1))


@pytest.mark.parametrize(
    ("plan", "devices"), [("dp2", 2), ("tp2", 2), ("tp4", 4), ("zero1", 4), ("zero3", 4), ("dp2xtp2", 4)]
)
def test_plans_round_alike(alone, plan, devices):
    state = trained(make(plan, devices))
    floats = {key for key, x in state.items() if x.dtype == torch.bfloat16}
    assert floats == {f"{kind}:{name}" for kind in ("param", "exp_avg", "exp_avg_sq") for name in ("table", "matrix")}
    assert all(torch.equal(state[key], x) for key, x in alone.items())


def test_microbatches_round_as_the_batch_does(alone):
    state = trained(make("single", 1, accumulate=2))
    assert all(torch.equal(state[key], x) for key, x in alone.items())


@pytest.mark.parametrize("level", ["O1", slow("O2")])
def test_levels_round_alike(alone, level):
    """Compiled, a last bit of a float32 may differ, and then rarely what it is rounded to, by one."""
    state = trained(make("single", 1, level=level))
    for key, x in alone.items():
        torch.testing.assert_close(state[key], x, rtol=2**-7, atol=0)
        assert (state[key] == x).float().mean() > 0.99


def test_seeds_round_otherwise(alone):
    state = trained(make("single", 1, seed=1))
    assert all(not torch.equal(state[key], x) for key, x in alone.items() if key != "step")


def test_a_step_left_out_rounds_nothing():
    step = make("dp2", 2, max_nonfinite_steps=1)
    step(batch(0))
    before = {key: x.clone() for key, x in step.training_state().items()}
    bad = batch(1)
    bad["x"][0, 0] = torch.nan
    step(bad)
    after = step.training_state()
    assert all(torch.equal(after[key], x) for key, x in before.items() if key not in ("step", "skipped"))


def test_masters_have_nothing_to_round():
    with pytest.raises(ValueError, match="fp32_master_weights and stochastic_rounding exclude each other"):
        make("single", 1, fp32_master_weights=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_bfloat16_is_rounded(dtype):
    model = Net().to(dtype)
    data = {"ids": batch(0)["ids"], "x": batch(0)["x"].to(dtype)}
    with pytest.raises(ValueError, match="stochastic_rounding needs a trained bfloat16 parameter"):
        tutti.parallelize(model, torch.optim.SGD(model.parameters()), data, cluster="cpu:1", stochastic_rounding=True)
