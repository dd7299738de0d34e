import numpy as np
import pytest

from tutti.plan.layouts.layout import Layout, Split
from tutti.plan.plan import Plan
from tutti.train.text.picture import coordinates, covered, loss_curve, plan_picture, running_mean

MESH = {"dp": 2, "tp": 3}


def test_ranks_are_numbered_row_major():
    assert [coordinates(MESH, r) for r in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert coordinates({}, 0) == ()


def test_a_split_dim_is_held_in_blocks():
    layout = Layout.of({"tp": Split(0)})
    assert covered(6, 0, layout, MESH, 1).tolist() == [False, False, True, True, False, False]
    assert covered(6, 1, layout, MESH, 1).all()
    assert np.array_equal(covered(6, 0, layout, MESH, 1), covered(6, 0, layout, MESH, 4))  # dp replicates


def test_a_strided_split_holds_a_part_of_each_block():
    layout = Layout.of({"dp": Split(0, outer=3)})  # a fused qkv of 3 blocks of 4
    assert np.flatnonzero(covered(12, 0, layout, MESH, 0)).tolist() == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize("layout", [{"dp": Split(0), "tp": Split(0, 2)}, {"dp": Split(0, 3), "tp": Split(0)}])
def test_two_axes_on_one_dim_hold_every_index_once(layout):
    masks = [covered(12, 0, Layout.of(layout), MESH, rank) for rank in range(6)]
    assert (sum(m.astype(int) for m in masks) == 1).all()


def test_the_picture_has_a_row_for_each_kind_of_parameter_and_a_column_for_each_rank():
    plan = Plan(
        MESH,
        inputs={
            "param:layers.*.up.weight": Layout.of({"tp": Split(0)}),
            "exp_avg:layers.*.up.weight": Layout.of({"tp": Split(0), "dp": Split(1)}),
            "exp_avg_sq:layers.*.up.weight": Layout.of({"tp": Split(0), "dp": Split(1)}),
        },
    )
    shapes = {f"layers.{i}.up.weight": (6, 4) for i in range(3)} | {"norm.weight": (4,)}
    svg = plan_picture(plan, shapes)
    assert svg.startswith("<svg")
    for text in ("layers.*.up.weight, 6 x 4", "norm.weight, 4"):
        assert svg.count(f">{text}<") == 1
    assert all(f">rank {r}: dp {r // 3} tp {r % 3}<" in svg for r in range(6)) and "rank 6" not in svg
    assert svg.count(">optimizer state<") == 6


def test_layers_of_several_kinds_have_their_own_rows():
    split = Layout.of({"tp": Split(0)})
    plan = Plan({"tp": 2}, inputs={"param:h.0.weight": split, "param:h.1-3.weight": Layout.of({"tp": Split(1)})})
    svg = plan_picture(plan, {f"h.{i}.weight": (4, 4) for i in range(4)})
    assert svg.count(">h.0.weight, 4 x 4<") == svg.count(">h.1-3.weight, 4 x 4<") == 1 and "h.*" not in svg


def test_a_plan_for_one_device_is_one_column():
    svg = plan_picture(Plan({}), {"weight": (4, 4), "scalar": ()})
    assert "rank 0" in svg and "rank 1" not in svg


def test_the_running_mean_of_a_constant_is_the_constant():
    assert running_mean([3.0] * 200) == pytest.approx(np.full(200, 3.0))
    means = running_mean(list(np.linspace(8, 2, 300)))
    assert means[0] == 8 and (np.diff(means) < 0).all() and abs(means[-1] - 2) < 0.2


def test_the_loss_curve_names_its_lines():
    svg = loss_curve(([1, 2, 3], [3.0, 2.0, 1.0]), ([3], [1.5]))
    assert ">training<" in svg and ">held-out text<" in svg and ">loss (nats a token)<" in svg
    assert ">held-out text<" not in loss_curve(([1, 2], [3.0, 2.0]), ([], []))
