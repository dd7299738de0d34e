"""Pins fix parts of a plan, and are refused where they cannot be."""

import pytest
import torch

import tutti
import zoo
from searches import search
from tutti.plan.layouts.layout import Split
from tutti.plan.layouts.pin import parse_pin, resolve
from tutti.plan.planner import Planner

UP = "model.layers.*.mlp.up_proj.weight"
CLUSTER = tutti.Cluster.parse("cpu:4")


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(2)
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))


def test_a_pattern_holds_for_all_layers(graph):
    assert resolve([tutti.pin(UP, dim=0, axis="tp")], graph) == {f"param:{UP}": {"tp": Split(0)}}


@pytest.mark.parametrize("dim", [0, 1])
def test_the_rest_is_searched_around_a_pin(graph, dim):
    plan = search(graph, "cpu:2", pins=[tutti.pin(UP, dim=dim, axis="tp")]).best()
    assert plan.inputs[f"param:{UP}"]["tp"] == Split(dim)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ([tutti.pin("model.layer.*.mlp.up_proj.weight", dim=0, axis="tp")],
         r"matches no parameter; the nearest is 'model.layers.\*.mlp.up_proj.weight'"),
        ([tutti.pin("model.layers.0.mlp.up_proj.weight", dim=0, axis="tp")],
         r"matches 'model.layers.0.*' but not 'model.layers.1.*', which is planned with it; write"),
        ([tutti.pin(UP, dim=2, axis="tp")], "names dim 2 of .* which has 2 dims"),
        ([tutti.pin(UP, dim=0, axis="tp"), tutti.pin("*.up_proj.weight", dim=1, axis="tp")],
         r"two pins contradict each other on .*: \S+up_proj.weight=tp:S0 and \*.up_proj.weight=tp:S1"),
    ],
)  # fmt: skip
def test_pins_that_cannot_be(graph, pins, message):
    with pytest.raises(ValueError, match=message):
        resolve(pins, graph)


def test_layers_of_a_kind_are_pinned_by_the_name_that_plans_have_for_them():
    model = torch.nn.Sequential(*(torch.nn.Linear(n, 8) for n in (4, 8, 8)))
    graph = tutti.capture(model, (torch.ones(2, 4),), loss=lambda model, batch: model(batch[0]).sum())
    assert resolve([tutti.pin("1-2.weight", dim=1, axis="tp")], graph) == {"param:1-2.weight": {"tp": Split(1)}}
    with pytest.raises(ValueError, match=r"matches '1.weight' but not '2.weight', .*; write '1-2.weight'"):
        resolve([tutti.pin("1.weight", dim=1, axis="tp")], graph)


def test_a_pin_on_an_axis_that_no_mesh_has(graph):
    pins = [tutti.pin(UP, dim=0, axis="ep")]
    with pytest.raises(ValueError, match=r"; without a given mesh the axes are 'dp' and 'tp'"):
        search(graph, CLUSTER, pins=pins).best()
    with pytest.raises(ValueError, match=r"names axis 'ep'; the mesh has \['tp'\]"):
        Planner(graph, CLUSTER, pins).named("tp")
    plan = search(graph, CLUSTER, pins=pins, mesh={"dp": CLUSTER.size // 2, "ep": 2}).best()
    assert plan.inputs[f"param:{UP}"]["ep"] == Split(0)


def test_a_pin_that_keeps_whole(graph):
    plan = search(graph, CLUSTER, pins=[tutti.pin(UP, dim=None, axis="tp")], mesh={"tp": CLUSTER.size}).best()
    assert f"param:{UP}" not in plan.inputs


def test_pins_are_written_as_plans_are_read():
    assert parse_pin(f"{UP}=tp:S0") == tutti.pin(UP, dim=0, axis="tp")
    assert parse_pin("h.*.qkv.weight=tp:S0/3") == tutti.pin("h.*.qkv.weight", dim=0, axis="tp", outer=3)
    assert parse_pin("a=dp:R") == tutti.pin("a", dim=None, axis="dp") and str(parse_pin("a=dp:R")) == "a=dp:R"
    for text in ("a", "a=tp", "a=tp:X", "a=tp:P", "=tp:S0", "a=:S0"):
        with pytest.raises(ValueError, match=r"no pin .*: write PATTERN=AXIS:S<dim> or PATTERN=AXIS:R"):
            parse_pin(text)


def test_a_pin_that_does_not_divide(graph):
    planner = Planner(graph, tutti.Cluster.parse("cpu:5"), [tutti.pin(UP, dim=0, axis="tp")])
    with pytest.raises(ValueError, match=r"shape \(96, 64\) cannot be split at dim 0 over 5 devices of axis 'tp'"):
        planner.named("tp")
