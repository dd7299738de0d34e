"""Captured steps go through JSON unchanged, and texts that are none are refused."""

from __future__ import annotations

import json

import pytest
import torch

import zoo
from tutti.hardware import Cluster
from tutti.ir.graph_file import from_json, to_json
from tutti.ir.portable import NotPortable
from tutti.ir.step_graph import StepGraph
from tutti.plan.planner import Planner
from tutti.sim.planning import Simulator
from tutti.tracing.capture import capture


@pytest.fixture(scope="module")
def step() -> StepGraph:
    model = zoo.llama(2)
    return capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()), clip_norm=1.0)


def test_a_step_is_read_as_it_was_written(step):
    copy = from_json(to_json(step))
    assert copy.fingerprint == step.fingerprint and str(copy) == str(step)
    for ours, theirs in zip(copy.nodes, step.nodes, strict=True):
        assert ours.op == theirs.op == "output" or ours.meta == theirs.meta
    assert (copy.checks, copy.counts, copy.matches) == (step.checks, step.counts, step.matches)


def test_it_is_planned_and_simulated_as_the_step_is(step):
    copy, cluster = from_json(to_json(step)), Cluster.parse("h100:8")
    ours, theirs = (Simulator("O0")(x, Planner(x, cluster).named("dp4xtp2xzero3"), cluster) for x in (copy, step))
    assert ours == theirs


def test_constants_keep_their_values(step):
    values = {"a": torch.tensor([1.5, float("inf"), -0.0]), "b": torch.tensor(7, dtype=torch.int8)}
    step = step.keep(list(step.outputs))
    step.constants = values
    read = from_json(to_json(step)).constants
    assert all(torch.equal(read[k], x) and read[k].dtype == x.dtype for k, x in values.items())
    step.constants = {"large": torch.zeros(100_000)}
    with pytest.raises(NotPortable, match="100000"):
        to_json(step)


def _changed(text: str, **values) -> str:
    return json.dumps({**json.loads(text), **values})


def test_other_texts_are_refused(step):
    text = to_json(step)
    data = json.loads(text)
    call = next(i for i, row in enumerate(data["nodes"]) if row[0] == "call_function")

    def calling(target: str) -> str:
        rows = [list(row) for row in data["nodes"]]
        rows[call][2] = target
        return _changed(text, nodes=rows)

    hostile = {
        "no JSON": text[: len(text) // 2],
        "another document": "[1, 2]",
        "deep": "[" * 100_000,
        "a function": calling("function os.system"),
        "a function of an allowed module": calling("function operator.methodcaller"),
        "no operator": calling("op aten.no_such_operator.default"),
        "a loader": calling("op load_library.__call__.x"),
        "a node that is not there": _changed(text, inputs={"param:a": 10**6}),
        "fewer descriptions": _changed(text, info=data["info"][:-1]),
        "another dtype": _changed(text, constants={"a": ["Tensor", [], [1]]}),
        "another size": _changed(text, constants={"a": ["int64", [10**12], [1]]}),
        "another device": _changed(text, device="nowhere"),
    }
    for what, case in hostile.items():
        with pytest.raises(ValueError, match="not a captured step"):
            from_json(case)
            pytest.fail(what)
