"""A recommendation model with a table that no device could hold: the planner splits the table by rows, and it trains.

The table has 12 columns, which do not divide over 8 devices; and only an eighth of it leaves a device enough memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import models
import tutti
from tutti.hardware.device import Link, Outer
from tutti.plan.layouts.layout import Layout, Split
from tutti.tracing.capture import Loss

ROWS, WIDTH, BAG, BATCH, DEVICES = (48_000, 480, 96), 12, 4, 96, 8
TABLE = ROWS[0] * WIDTH * 4  # bytes
MEMORY = 0.75 * TABLE
LARGE = "tables.0.weight"


def case() -> tuple[torch.nn.Module, dict[str, torch.Tensor], Loss, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, (_, _, loss) = models.DLRM(ROWS, WIDTH), models.dlrm()
    sparse = torch.stack([models.integers(BATCH, BAG, below=n, seed=n) for n in ROWS], 1)
    clicked = models.integers(BATCH, below=2).float()
    batch = {"dense": models.random(BATCH, 6), "sparse": sparse, "clicked": clicked}
    return model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def cluster(devices: int, memory: float = MEMORY) -> tutti.Cluster:
    preset = tutti.Cluster.parse(f"h100:{devices}")
    device = replace(preset.device, memory=memory, beside=Outer(0, 1, 1, "nothing lies outside of it"))
    return tutti.Cluster(device, ((devices, Link(450e9, 3e-6)),))


def parallelize(on: tutti.Cluster, plan: str = "auto", **options) -> tuple[tutti.Step, dict[str, torch.Tensor]]:
    model, batch, loss, optimizer = case()
    return tutti.parallelize(model, optimizer, batch, loss=loss, cluster=on, plan=plan, level="O0", **options), batch


@pytest.fixture(scope="module")
def one():
    """The losses of two steps on one device with enough memory, and what is kept after them."""
    step, batch = parallelize(cluster(1, memory=1e12), "single")
    return [step(batch).item() for _ in range(2)], step.training_state()


def same_numbers(step: tutti.Step, batch: dict[str, torch.Tensor], one) -> None:
    losses, expected = one
    assert [step(batch).item() for _ in range(2)] == pytest.approx(losses, rel=1e-5)
    ours = step.training_state()
    for key in expected.keys() - {"step"}:
        error = (ours[key] - expected[key]).norm() / expected[key].norm()
        assert error <= 1e-5, f"{key} differs by {error:.1e}"


def largest(step: tutti.Step) -> int:
    """Bytes of the largest tensor in the program of a rank."""
    values = [node.meta["val"] for node in step.program.graph.nodes if node.op != "output"]
    return max(spec.bytes for value in values for spec in (value if isinstance(value, tuple) else (value,)) if spec)


@pytest.mark.slow
def test_one_device_has_too_little_memory():
    with pytest.raises(
        ValueError, match=r"no plan fits into 1.65 MiB per device on h100:1: the smallest, auto-single, needs"
    ):
        parallelize(cluster(1))


@pytest.mark.slow
def test_the_planner_splits_the_table_by_rows(one):
    step, batch = parallelize(cluster(DEVICES))
    assert step.plan.prediction.peak_bytes <= MEMORY
    assert Split(0) in dict(step.plan.inputs[f"param:{LARGE}"].placements).values(), step.plan.explain()
    assert "rejected " in step.plan.explain()
    assert largest(step) < 0.51 * TABLE, "neither the table nor its gradient is ever whole"
    same_numbers(step, batch, one)


def test_a_pin_splits_the_table_by_rows_where_columns_would_do(one):
    free, _ = parallelize(cluster(4), "tp4")
    assert free.plan.inputs[f"param:{LARGE}"] == Layout.of({"tp": Split(1)}), "columns send less than sums of rows"
    step, batch = parallelize(cluster(4), "tp4", pins=[tutti.pin(LARGE, dim=0, axis="tp")])
    assert step.plan.inputs[f"param:{LARGE}"] == Layout.of({"tp": Split(0)})
    assert largest(step) < 1.01 * TABLE / 4
    same_numbers(step, batch, one)
