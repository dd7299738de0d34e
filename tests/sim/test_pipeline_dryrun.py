"""A pipeline on the clock: bubbles as the formulas say, memory by what is in flight, and what devices really hold."""

import pytest
import torch

import tutti
import zoo
from tutti.lower.parts.cut import Place
from tutti.lower.parts.schedule_parts import schedule_of
from tutti.plan.planner import Planner
from tutti.sim import panels
from tutti.sim.dryrun import dry_run
from tutti.sim.gantt import save_gantt
from tutti.sim.pipeline import RESIDENT, PipelineDryRun
from tutti.sim.timeline import timeline

COUNT = 12
UNIFORM = {f"layers.{i}": i for i in range(4)}
PAIRS, ALONE = {f"layers.{i}": i // 2 for i in range(8)}, {f"layers.{i}": i for i in range(8)}


class Tower(torch.nn.Module):
    """Equal layers, and next to nothing beside them."""

    def __init__(self, layers: int = 4, width: int = 1024):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.Tanh(), torch.nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def tower(layers):
    with torch.device("meta"):
        model, x = Tower(layers), torch.empty(2048, 1024)
    return tutti.capture(model, (x,), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(scope="module")
def graph():
    return tower(4)


def dried(graph, schedule, stages=UNIFORM, devices=4) -> PipelineDryRun:
    plan = tutti.Plan({"pp": devices}, accumulate=COUNT, stages=stages, schedule=schedule)
    run = dry_run(graph, plan, tutti.Cluster.parse(f"h100:{devices}"))
    assert isinstance(run, PipelineDryRun)
    return run


@pytest.mark.parametrize("schedule, stages, devices, share", [
    ("gpipe", UNIFORM, 4, 3 / COUNT),
    ("1f1b", UNIFORM, 4, 3 / COUNT),
    ("interleaved", UNIFORM, 2, 1 / 2 / COUNT),
])  # fmt: skip
def test_bubbles_of_equal_stages(graph, schedule, stages, devices, share):
    run = dried(graph, schedule, stages, devices)
    assert run.bubble / (run.seconds - run.bubble) == pytest.approx(share, rel=0.1)


def test_pairs_hide_communication():
    """Tensor parallelism communicates within each stage. Of a pair, one part computes meanwhile."""
    step, cluster = tower(8), tutti.Cluster.parse("h100:4")
    waits = {}
    for name in ("pp2-interleaved2xtp2", "pp2-dualpipevxtp2"):
        run = dry_run(step, Planner(step, cluster, (), COUNT).named(name), cluster)
        waits[name] = run.prediction().communication_seconds
    assert isinstance(run, PipelineDryRun) and {span.work for span in run.spans} >= {"forward and backward"}
    assert waits["pp2-dualpipevxtp2"] < 0.6 * waits["pp2-interleaved2xtp2"]
    paired = sum(part.runs for *_, part in run.pairs)
    assert paired == sum(span.action.second is not None for span in run.spans)
    assert [part.runs for part in run.counted] != [COUNT] * len(run.counted)


def test_a_split_backward_pass_waits_less(graph):
    assert dried(graph, "zb-h1").bubble < 0.6 * dried(graph, "1f1b").bubble
    twice = tower(8)
    assert dried(twice, "zb-v", ALONE).bubble < 0.4 * dried(twice, "1f1b", PAIRS).bubble


def test_devices_hold_as_many_microbatches_as_are_in_flight(graph):
    """In 1F1B the d-th device holds p - d, in GPipe each device all of them."""
    activations = {name: [m.kinds["activations"] for m in dried(graph, name).memories] for name in ("1f1b", "gpipe")}
    one = activations["1f1b"][-1]
    assert activations["1f1b"][0] / one == pytest.approx(4, rel=0.3)
    assert activations["gpipe"][2] / one == pytest.approx(COUNT, rel=0.3)
    assert activations["1f1b"] == sorted(activations["1f1b"], reverse=True)


def test_a_device_holds_the_state_of_its_stages_alone(graph):
    run = dried(graph, "1f1b")
    whole = sum(graph.spec(f"param:{name}").bytes for name in graph.names("param"))
    assert sum(m.kinds["parameters"] for m in run.memories) == whole
    gradients = [max(memory.kinds["accumulated gradients"] for memory in course) for course in run.courses]
    assert sum(gradients) == whole, "each device accumulates those of its own parameters"
    assert all(
        memory.total >= sum(memory.kinds[kind] for kind in RESIDENT) for course in run.courses for memory in course
    )


def test_a_split_state_counts_as_its_parts():
    model = zoo.llama(4)
    graph = tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))
    cluster = tutti.Cluster.parse("h100:4")
    run = dry_run(graph, Planner(graph, cluster, (), 1).named("pp2xtp2"), cluster)
    assert isinstance(run, PipelineDryRun)
    for memory in run.memories:
        assert memory.kinds["optimizer state"] == pytest.approx(2 * memory.kinds["parameters"], rel=0.01)


def test_what_is_sent_is_what_crosses(graph):
    run = dried(graph, "1f1b")
    activation = 2048 * 1024 * 4
    messages, size = run.sent[1]
    assert size == pytest.approx(2 * COUNT * activation, rel=0.01) and messages >= 2 * COUNT


def test_activations_that_every_device_holds_between_its_actions():
    """As the runtime holds them."""
    model, data = zoo.llama(4), zoo.tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    step = tutti.parallelize(model, optimizer, data, cluster="cpu:2", plan="pp2", level="O0", accumulate=4)
    most = [0, 0]

    def watch(device, act):
        def acting(action):
            acted = act(action)
            storages = {
                x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for row in device.values.values()
                for x in row
            }
            most[device.number] = max(most[device.number], sum(storages.values()))
            return acted

        return acting

    step(data)
    (executor,) = step._executables.executors.values()
    for device in executor.local_devices.values():
        device.act = watch(device, device.act)
    step(data)
    run = dry_run(step.graph, step.plan, tutti.Cluster.parse("cpu:2"))
    for memory, bytes_held in zip(run.memories, most, strict=True):
        assert memory.kinds["activations"] == pytest.approx(bytes_held, rel=0.25)


def test_planned_by_name_and_explained():
    model = zoo.llama(4)
    graph = tutti.capture(model, zoo.tokens(batch=3), torch.optim.AdamW(model.parameters()))
    plan = Planner(graph, tutti.Cluster.parse("cpu:2"), (), 4).named("pp2-zb-h1")
    cut, schedule = schedule_of(graph, plan, 4)
    assert schedule.name == "zb-h1" and Place(1, "W") in cut.parts
    text = plan.replace(prediction=dry_run(graph, plan, tutti.Cluster.parse("cpu:2")).prediction()).explain()
    assert "a pipeline of 2 stages, zb-h1" in text and "for the pipeline" in text and "send over pp" in text
    assert tutti.Plan.from_json(plan.to_json()) == plan.replace(prediction=None)


def test_a_picture_and_a_trace(graph, tmp_path, monkeypatch):
    run = dried(graph, "zb-h1")
    save_gantt(run, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert "device 3" in text and "gradients" in text and "update" in text and "how it begins" not in text
    monkeypatch.setattr(panels, "MANY", 2)
    monkeypatch.setattr(panels, "FIRST", 5)
    (title, seconds, rows), (_, whole, all_rows) = panels.panels(run)
    first = [end for blocks in rows["device 0"].values() for _, end in blocks]
    assert title == "how it begins" and len(first) == 5 and max(first) <= seconds < whole
    assert rows["device 0"]["forward"] == all_rows["device 0"]["forward"][: len(rows["device 0"]["forward"])]
    events = timeline(run)["traceEvents"]
    work = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert sum(e["dur"] for e in work) / 1e6 == pytest.approx(run.seconds - _idle(run, 2))
    assert "stage 2 W of microbatch 11" in {e["name"] for e in work}


def test_a_call_of_a_function():
    """Stages take turns; the memory of stored tensors is that of the store."""
    model, data = zoo.llama(4), zoo.tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    store, cluster = tutti.Store(model=model, optimizer=optimizer), tutti.Cluster.parse("cpu:2")
    fn = tutti.train_step(model, optimizer, data, store=store, cluster=cluster, plan="pp2")
    run = dry_run(fn.graph, fn.plan, cluster)
    assert isinstance(run, PipelineDryRun) and [s.name for s in run.spans] == [
        "stage 0 C0",
        "stage 1 C1",
        "stage 0 C2",
    ]
    assert all(a.end <= b.begin for a, b in zip(run.spans, run.spans[1:], strict=False))
    assert {s.work for s in run.spans} == {"call"} and run.bubble > 0
    for memory, part in zip(run.memories, store.parts, strict=True):
        stored_bytes = sum(x.untyped_storage().nbytes() for x in part.values())
        assert memory.kinds["parameters"] + memory.kinds["optimizer state"] == pytest.approx(stored_bytes, rel=0.01)


def _idle(run, device):
    spans = sorted((s.begin, s.end) for s in run.spans if s.device == device)
    return run.seconds - sum(end - begin for begin, end in spans)
