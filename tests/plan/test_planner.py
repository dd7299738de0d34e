"""The planner: every device count, every textbook plan, and errors that say what would work."""

import time

import pytest
import torch

import tutti
import zoo
from cases import slow
from searches import alone, predicted, wide
from tutti.plan.layouts.layout import Layout, Split, devices
from tutti.plan.planner import Planner, replan
from tutti.plan.textbook import Textbook
from tutti.sim.planning import Simulator


def capture(make=zoo.llama, batch=12, **options):
    model = make()
    return tutti.capture(model, zoo.tokens(batch), torch.optim.AdamW(model.parameters()), **options)


@pytest.fixture(scope="module")
def graph():
    return capture(lambda: zoo.llama(1))


@pytest.mark.parametrize("count", [1, 3, slow(6), 7, slow(12)])
def test_any_number_of_devices_is_planned_and_runs(count):
    model, batch = zoo.llama(1), zoo.tokens(12)
    optimizer = torch.optim.AdamW(model.parameters())
    step = tutti.parallelize(model, optimizer, batch, cluster=f"cpu:{count}", level="O0")
    assert devices(step.plan.mesh) == count
    loss = model(**batch).loss.item()
    assert step(batch).item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("zero", "parameters", "state"), [("dp4", 1, 1), ("zero1", 1, 4), ("zero2", 1, 4), ("zero3", 4, 4)]
)
def test_memory_by_zero_stage(graph, zero, parameters, state):
    """Rajbhandari et al., "ZeRO" (2020): a stage divides what it shards by the number of devices."""
    by_kind = predicted(graph, "cpu:4", zero).predicted.bytes_by_kind
    whole = sum(graph.spec(f"param:{name}").bytes for name in graph.names("param"))
    assert by_kind["parameters"] == whole / parameters
    assert by_kind["optimizer state"] == pytest.approx(2 * whole / state, rel=1e-3)


def test_a_batch_that_is_too_small(graph):
    with pytest.raises(ValueError, match="a batch of 12 does not divide over 13 data-parallel devices"):
        Planner(graph, tutti.Cluster.parse("cpu:13")).named("dp")
    with pytest.raises(ValueError, match="each of 4 microbatches has 12 rows, and that does not divide over 13"):
        Planner(graph, tutti.Cluster.parse("cpu:13"), accumulate=4).named("dp")


def test_memory_of_uneven_parts(graph):
    by_kind = predicted(graph, "cpu:5", "zero3").predicted.bytes_by_kind
    uneven = sum(-(-spec.shape[0] // 5) * spec.bytes // spec.shape[0]
                 for spec in (graph.spec(f"param:{name}") for name in graph.names("param")))  # fmt: skip
    assert by_kind["parameters"] <= uneven, "5 divides no dim of the model: the first rank has the rounded-up part"


def test_what_a_batch_leaves_out(graph):
    undivided = Planner(graph, tutti.Cluster.parse("cpu:8")).undivided()
    assert undivided == (
        "a batch of 12 does not divide over 8 devices: axes of that size split it unevenly or split another dim "
        "(a batch of 16 would divide)",
    )
    assert not Planner(graph, tutti.Cluster.parse("cpu:6")).undivided()
    assert "a microbatch of 12" in Planner(graph, tutti.Cluster.parse("cpu:8"), (), 2).undivided()[0]


@pytest.mark.slow
def test_a_price_on_memory_makes_a_candidate_smaller_and_slower(graph):
    candidate = Planner(graph, tutti.Cluster.parse("h100:4")).on({"dp": 2, "tp": 2})
    fastest, smallest = candidate.chosen, candidate.smallest()
    assert fastest.price == 0 and fastest.seconds == fastest.cost
    between = candidate.within((fastest.memory + smallest.memory) / 2, time.monotonic() + 60)
    assert smallest.memory <= between.memory <= (fastest.memory + smallest.memory) / 2
    assert fastest.seconds < between.seconds <= 1.001 * smallest.seconds
    assert candidate.within(0, time.monotonic() + 60).memory == pytest.approx(smallest.memory, rel=0.01)
    assert "if a GiB of memory costs" in candidate.plan(between).reasons[-1]
    assert candidate.plan().reasons[-1] == (
        "proven for this mesh alone: no other splits of operators and tensors on this mesh have a lower modelled cost"
    )


def test_what_is_kept_is_what_changes_the_peak(graph):
    """The bytes that a price makes fewer are those of which a rank's peak is made."""
    cluster = alone("h100:4")
    candidate = Planner(graph, cluster).on({"dp": 4})
    beside = []
    for chosen in (candidate.chosen, candidate.smallest()):
        prediction = Simulator("O0")(graph, candidate.plan(chosen), cluster)
        beside.append(prediction.peak_bytes - chosen.memory)
    assert candidate.smallest().memory < 0.7 * candidate.chosen.memory
    assert abs(beside[0] - beside[1]) < 0.1 * candidate.chosen.memory


def test_gradients_are_kept_together_where_they_wait_for_one_another():
    """This is a large model; the gradients of a small one always are, in one piece."""
    cluster, peaks = alone("h100:2"), []
    for options, together in (({}, False), ({"clip_norm": 1.0}, True)):
        step = wide(batch=2, layers=4, length=16, **options)
        candidate = Planner(step, cluster).textbook(Textbook(2, 1, 0))
        assert bool(candidate.joint.memory.gradients) == together
        peaks.append(Simulator("O0")(step, candidate.plan(), cluster).peak_bytes)
    whole = sum(step.spec(f"param:{name}").bytes for name in step.names("param"))
    assert peaks[1] - peaks[0] > 0.3 * whole
    assert Planner(capture(), cluster).textbook(Textbook(2, 1, 0)).joint.memory.gradients


@pytest.mark.parametrize(
    ("asked", "count", "expected"),
    [("tp2xzero3", 4, "tp2xzero3"), ("dp", 4, "dp"), ("single", 1, "single")],
)
def test_a_plan_keeps_the_name_that_was_asked_for(graph, asked, count, expected):
    plan = Planner(graph, tutti.Cluster.parse(f"cpu:{count}")).named(asked)
    assert plan.name == expected and plan.explain().startswith(f"plan {expected}: mesh ")


def test_other_shapes_lie_as_the_plan_says(graph):
    cluster = tutti.Cluster.parse("cpu:4")
    plan = Planner(graph, cluster).named("tp2xzero3")
    other = replan(capture(lambda: zoo.llama(1), batch=4), plan, cluster)
    params = [label for label in plan.inputs if not label.startswith("batch:")]
    assert params and all(other.input_layout(label) == plan.input_layout(label) for label in params)
    assert other.input_layout("batch:input_ids")["dp"] == Split(0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2, "dp": 2}, slow({"x": 2, "y": 2})])
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
    loss = model(**half).loss.item()
    assert step(half).item() == pytest.approx(loss, rel=1e-5)


def test_prediction_adds_up(graph):
    prediction = predicted(graph, "cpu:4", "tp2xzero3").predicted
    assert prediction.step_seconds == pytest.approx(prediction.compute_seconds + prediction.communication_seconds)
    assert prediction.peak_bytes == sum(prediction.bytes_by_kind.values())
    assert prediction.communication_bytes == sum(sent for _, sent in prediction.collectives.values())


def test_what_is_stored_once_is_not_remembered(graph):
    cluster, label = tutti.Cluster.parse("cpu:2"), "param:model.layers.*.mlp.up_proj.weight"
    planner, fresh = Planner(graph, cluster), Planner(graph, cluster).named("tp2")
    assert fresh.inputs[label] == Layout.of({"tp": Split(0)})
    stored = planner.textbook(Textbook(tp=2), {label: Layout.of({"tp": Split(1)})}).plan()
    assert stored.inputs[label] == Layout.of({"tp": Split(1)})
    assert planner.named("tp2") == fresh
