"""The planner: every device count, every textbook plan, and errors that say what would work."""

from dataclasses import replace

import pytest
import torch

import tutti
import zoo
from tutti.plan.estimate import Estimator
from tutti.plan.layout import Layout, Split, devices
from tutti.plan.planner import Planner, replan
from tutti.plan.textbook import Textbook


def capture(make=zoo.llama, batch=12, **options):
    model = make()
    return tutti.capture(model, zoo.tokens(batch), torch.optim.AdamW(model.parameters()), **options)


@pytest.fixture(scope="module")
def graph():
    return capture(lambda: zoo.llama(1))


@pytest.mark.parametrize("count", [1, 3, 6, 7, 12])
def test_any_number_of_devices_is_planned_and_runs(count):
    model, batch = zoo.llama(1), zoo.tokens(12)
    optimizer = torch.optim.AdamW(model.parameters())
    step = tutti.parallelize(model, optimizer, batch, cluster=f"cpu:{count}", level="O0")
    assert devices(step.plan.mesh) == count
    assert step(batch).item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_ranked_plans_are_one_for_each_mesh_and_the_textbook_with_the_fitting_ones_by_time(graph):
    seen = []
    planner = Planner(graph, tutti.Cluster.parse("cpu:4"))
    plans = planner.ranked(lambda done, total: seen.append((done, total)))
    assert {p.name for p in plans if not p.name.startswith("auto-")} == {"dp4", "dp4xzero1", "dp4xzero3", "tp4"}
    meshes = [tuple(p.mesh.values()) for p in plans if p.name.startswith("auto-")]
    assert sorted(meshes) == [(2, 2), (4,)] and plans[0].name.startswith("auto-")
    assert seen == [(i, 2) for i in range(3)]
    seconds = [p.prediction.step_seconds for p in plans]
    assert seconds == sorted(seconds)
    best = planner.best(plans)
    assert best.name == plans[0].name and best.reasons[0].startswith(f"chosen {best.name}: ")
    assert best.graph == graph.fingerprint and best.cluster == "cpu:4"


@pytest.mark.parametrize(
    ("zero", "parameters", "state"), [("dp4", 1, 1), ("zero1", 1, 4), ("zero2", 1, 4), ("zero3", 4, 4)]
)
def test_memory_by_zero_stage(graph, zero, parameters, state):
    """Rajbhandari et al., "ZeRO" (2020): a stage divides what it shards by the number of devices."""
    made = Planner(graph, tutti.Cluster.parse("cpu:4")).named(zero).prediction.bytes_by_kind
    whole = sum(graph.spec(f"param:{name}").bytes for name in graph.names("param"))
    assert made["parameters"] == whole / parameters
    assert made["optimizer state"] == pytest.approx(2 * whole / state, rel=1e-3)


def test_a_batch_that_does_not_divide(graph):
    with pytest.raises(ValueError, match="a batch of 12 does not divide over 5 data-parallel devices"):
        Planner(graph, tutti.Cluster.parse("cpu:5")).named("dp")
    best = Planner(graph, tutti.Cluster.parse("cpu:5")).best()
    assert "left out dp 5: a batch of 12 does not divide over so many devices, one of 15 would" in best.reasons


def test_what_a_batch_leaves_out_is_said(graph):
    link = tutti.Cluster.parse("cpu:8").levels[0][1]
    cpu = tutti.Cluster.parse("cpu").device
    plans = Planner(graph, tutti.Cluster(cpu, ((8, link),)))
    left_out = "left out dp 8: a batch of 12 does not divide over so many devices, one of 16 would"
    assert left_out in plans.best().reasons
    with pytest.raises(ValueError, match=f"use more devices or a smaller batch; {left_out}"):
        Planner(graph, tutti.Cluster(replace(cpu, memory=1e3), ((8, link),))).best()
    assert not any("left out" in reason for reason in Planner(graph, tutti.Cluster.parse("cpu:6")).best().reasons)
    assert any("a microbatch of 12" in r for r in Planner(graph, tutti.Cluster.parse("cpu:8"), (), 2).best().reasons)


@pytest.mark.parametrize(
    ("asked", "count", "kept"),
    [("tp2xzero3", 4, "tp2xzero3"), ("dp", 4, "dp"), ("single", 1, "single"), ("tp4xzero3", 4, "tp4")],
)
def test_a_plan_keeps_the_name_that_was_asked_for(graph, asked, count, kept):
    plan = Planner(graph, tutti.Cluster.parse(f"cpu:{count}")).named(asked)
    assert plan.name == kept and plan.explain().startswith(f"plan {kept}: mesh ")


def test_other_shapes_lie_as_the_plan_says(graph):
    cluster = tutti.Cluster.parse("cpu:4")
    plan = Planner(graph, cluster).named("tp2xzero3")
    other = replan(capture(lambda: zoo.llama(1), batch=4), plan, cluster)
    params = [label for label in plan.inputs if not label.startswith("batch:")]
    assert params and all(other.input_layout(label) == plan.input_layout(label) for label in params)
    assert other.input_layout("batch:input_ids")["dp"] == Split(0)


@pytest.mark.parametrize("mesh", [{"tp": 2, "dp": 2}, {"x": 2, "y": 2}])
def test_a_mesh_of_other_axes_is_kept(graph, mesh):
    cluster = tutti.Cluster.parse("cpu:4")
    plan = Planner(graph, cluster).named("dp2xtp2")
    rename = dict(zip(("dp", "tp"), ("dp", "tp") if "dp" in mesh else mesh, strict=True))
    plan = plan.replace(
        mesh=mesh,
        inputs={k: type(v).of({rename[a]: p for a, p in v.placements}) for k, v in plan.inputs.items()},
        operators={k: {rename[a]: c for a, c in v.items()} for k, v in plan.operators.items()},
    )
    model, batch = zoo.llama(1), zoo.tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    step = tutti.parallelize(model, optimizer, batch, cluster=cluster, plan=plan, level="O0")
    assert step.evaluate(batch).item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    half = {key: x[:6] for key, x in batch.items()}
    assert step(half).item() == pytest.approx(model(**half).loss.item(), rel=1e-5)


def test_prediction_adds_up(graph):
    planner = Planner(graph, tutti.Cluster.parse("cpu:4"))
    plan = planner.named("tp2xzero3")
    made = Estimator(graph, planner.problem, planner.cluster).predict(plan)
    assert made == plan.prediction
    assert made.step_seconds == made.compute_seconds + made.communication_seconds
    assert made.peak_bytes == sum(made.bytes_by_kind.values())
    assert made.communication_bytes == sum(sent for _, sent in made.collectives.values())


def test_what_is_stored_once_is_not_remembered(graph):
    cluster, label = tutti.Cluster.parse("cpu:2"), "param:model.layers.*.mlp.up_proj.weight"
    planner, fresh = Planner(graph, cluster), Planner(graph, cluster).named("tp2")
    assert fresh.inputs[label] == Layout.of({"tp": Split(0)})
    held = planner.textbook(Textbook(tp=2), {label: Layout.of({"tp": Split(1)})})
    assert held.inputs[label] == Layout.of({"tp": Split(1)})
    assert planner.named("tp2") == fresh
