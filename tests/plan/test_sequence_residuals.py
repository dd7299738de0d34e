"""`sp`: tensor parallelism splits norms and the residual stream along the sequence."""

from __future__ import annotations

import pytest
import torch

import models
import tutti
import zoo
from cases import slow

ROWS = ("tutti.rms_norm", "add.Tensor")


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(plan: str, devices: int):
    model, data = zoo.llama(2), zoo.tokens()
    step = tutti.parallelize(model, adam(model), data, cluster=f"cpu:{devices}", plan=plan, level="O0")
    gradients = step.gradients(data)
    return step, [step(data).item() for _ in range(2)], gradients


@pytest.fixture(scope="module")
def single():
    return trained("single", 1)


@pytest.mark.parametrize(
    ("plan", "devices"),
    [("tp2xsp", 2), slow("tp4xsp", 4), ("dp2xtp2xspxrecompute", 4), slow("cp2xtp2xsp", 4), slow("tp2xspxzero3", 4),
     slow("pp2xtp2xsp", 4), slow("tp2xspxrecompute-attention", 2)],
)  # fmt: skip
def test_the_numbers_of_one_device(plan, devices, single):
    step, losses, gradients = trained(plan, devices)
    assert losses == pytest.approx(single[1], rel=1e-5)
    for name, g in single[2].items():
        assert (gradients[name] - g).norm() <= 1e-5 * g.norm(), name
    rows_split = 0
    for label, choices in step.plan.operators.items():
        path, _, name = label.rpartition("/")
        if "layers" in path and "mlp/" not in path and "attn/" not in path and name.startswith(ROWS):
            phase = path.rpartition("/")[2]
            if phase in ("forward", "recompute"):
                assert choices["tp"].factor == "b", label  # (batch, sequence, hidden) are a, b, c
                rows_split += 1
    assert rows_split >= 4


@pytest.mark.parametrize("plan", ["tp2xsp", "tp2xspxrecompute"])
def test_blocks_begin_with_a_gather_and_end_with_a_scatter(plan):
    step, _, _ = trained(plan, 2)
    shape = step.graph.spec("batch:input_ids").shape
    stream = shape[0] * shape[1] * zoo.CONFIG["hidden_size"] * 4  # bytes of the residual stream, of one sequence a row
    large = [c for c in step.collectives() if c.bytes >= stream // 2 and "/update/" not in c.label]
    kinds = {c.kind for c in large if "layers" in c.label}
    assert "all_reduce" not in kinds and {"all_gather", "reduce_scatter"} <= kinds


def test_experts_over_tp_take_the_sequence_as_it_lies():
    """A residual stream that is split by tp goes to the experts without a gather."""
    losses = {}
    for plan in ("tp2xspxexperts2", "single"):
        model, batch, loss = models.case("mixtral")
        devices = 2 if plan != "single" else 1
        step = tutti.parallelize(model, adam(model), batch, loss=loss, cluster=f"cpu:{devices}", plan=plan, level="O0")
        losses[plan] = [float(step(batch)) for _ in range(2)]
    assert losses["tp2xspxexperts2"] == pytest.approx(losses["single"], rel=1e-5)


def test_what_cannot_be_split():
    model, data = zoo.llama(1), zoo.tokens()
    with pytest.raises(ValueError, match="sp splits the sequence over tp; add tp2 or more"):
        tutti.parallelize(model, adam(model), data, cluster="cpu:2", plan="dp2xsp", level="O0")


@pytest.mark.parametrize(("plan", "devices", "length"), [("cp2xtp4", 8, 12), ("cp2xtp2", 4, 10), ("tp2", 2, 9)])
def test_a_sequence_that_does_not_divide_stays_whole(plan, devices, length):
    """Batches of other lengths may follow the first, with the same plan."""
    model, data = zoo.llama(1), zoo.tokens(length=length)
    outcomes = []
    for name in (plan, f"{plan}xsp"):
        step = tutti.parallelize(model, adam(model), data, cluster=f"cpu:{devices}", plan=name, level="O0")
        norms = [
            choices for label, choices in step.plan.operators.items() if "layernorm/forward/tutti.rms_norm" in label
        ]
        outcomes.append((sum(c.bytes for c in step.collectives()), ["tp" in choices for choices in norms]))
    assert outcomes[1] == outcomes[0]
