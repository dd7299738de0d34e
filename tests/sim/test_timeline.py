"""The timeline as the trace event format has it, and the picture."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

import tutti
import zoo
from tutti.hardware import Cluster
from tutti.plan.planner import Planner
from tutti.sim.dryrun import dry_run
from tutti.sim.gantt import save_gantt
from tutti.sim.timeline import save_timeline, timeline

PHASES = {  # of an event: the keys that it must have, and the types of their values
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "pid": int, "tid": int, "ts": float, "args": dict},
}


@pytest.fixture(scope="module")
def run():
    model, data = zoo.llama(), zoo.tokens(batch=8)
    graph = tutti.capture(model, data, torch.optim.AdamW(model.parameters(), lr=1e-3))
    cluster = Cluster.parse("cpu:4")
    return dry_run(graph, Planner(graph, cluster, accumulate=3).named("dp2xtp2"), cluster)


def test_every_event_has_what_the_format_asks_for(run, tmp_path):
    save_timeline(run, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        asked = PHASES[event["ph"]]
        assert set(event) == {"ph", *asked}
        for key, kind in asked.items():
            assert isinstance(event[key], kind) or (kind is float and event[key] == 0), (key, event)
    assert {e["ph"] for e in trace["traceEvents"]} == set(PHASES)


def test_spans_are_microseconds_on_named_threads(run):
    events = timeline(run)["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads[0] == "compute" and set(threads.values()) >= {"communicate over dp", "communicate over tp"}
    spans = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * run.seconds)
    folded = [e for e in spans if e["cat"] == "folded"]
    assert [e["name"] for e in folded] == ["2 more of a microbatch"]
    for thread in threads:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == thread)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(times))
    computing = sum(e["dur"] for e in spans if e["tid"] == 0 and e["cat"] != "folded")
    assert computing == pytest.approx(1e6 * sum(p.simulation.busy(0)["compute"] for p in run.parts))
    assert any(e["name"].startswith("reduce_scatter model.layers.*") for e in spans)  # layers share their names


def test_the_counter_of_memory_reaches_the_peak(run):
    counted = [e["args"]["bytes"] for e in timeline(run)["traceEvents"] if e["ph"] == "C"]
    assert 0.95 * run.memory.peak <= max(counted) <= run.memory.peak


def test_the_picture_shows_every_stream(run, tmp_path):
    save_gantt(run, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert all(f"rank 0 {row}" in text for row in ("computes", "tp", "dp"))
    assert all(f">{word}<" in text for word in ("forward", "backward", "update", "all_reduce", "a microbatch, 3 times"))
    save_gantt(run, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text
    with pytest.raises(ValueError, match=r"must end in \.svg, \.png, \.pdf"):
        save_gantt(run, tmp_path / "step.gif")
