"""A step whose batch is cut into copies gives the same numbers; copies share labels, and so plans."""

from __future__ import annotations

import copy
from functools import cache

import pytest
from test_unroll import adam, numbers

import tutti
from cases import slow
from models import MODELS
from tutti.lower.variants.unroll import copy as copied
from tutti.lower.variants.vary import vary
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.plan.variant import Variant


@cache
def graph(name: str):
    model, batch, loss = MODELS[name]()
    return tutti.capture(model, batch, adam(model), loss, clip_norm=1.0)


@pytest.mark.parametrize("name", ["gpt2", slow("llama"), slow("mixtral"), slow("t5"), "resnet", "mixture"])
def test_numbers_are_those_of_the_whole_batch(name):
    """Dropout, a balance loss over all tokens, and statistics of a batch norm among them."""
    expected, halved = numbers(graph(name)), numbers(copied(graph(name), 2))
    assert halved.keys() == expected.keys()
    # behind a batch norm large terms cancel: what is left has their rounding
    rounding = 1e-7 * max(float(value.norm()) for key, value in expected.items() if key.startswith("grad"))
    for key, value in expected.items():
        if key.startswith(("loss", "grad", "exp_avg:", "buffer")):
            error = (halved[key].double() - value.double()).norm()
            assert error <= 2e-5 * value.double().norm() + rounding, key


def test_each_copy_has_half_of_the_work_and_the_labels_of_the_whole():
    whole, halved = graph("llama"), copied(graph("llama"), 2)
    assert (whole.batch_splits, halved.batch_splits) == (1, 2)
    assert halved.flops == pytest.approx(whole.flops, rel=0.01)
    products = [sum(n.meta["flops"] for n in halved.calls if "mm" in n.name and n.meta["copy"] == i) for i in range(2)]
    assert products[0] == products[1] > 0
    labels = [{n.meta["label"] for n in halved.calls if "mm" in n.name and n.meta["copy"] == i} for i in range(2)]
    assert labels[0] == labels[1] == {n.meta["label"] for n in whole.calls if "mm" in n.name}
    names = [n.meta["name"] for n in halved.calls]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["gpt2", slow("llama"), slow("mixtral"), slow("t5"), "resnet", "mixture"])
def test_calls_of_one_label_are_alike(name):
    """Plans are made for labels."""
    shapes: dict[str, set] = {}
    for node in copied(graph(name), 2).calls:
        kind = node.target, str([x.meta["val"] for x in (node, *node.all_input_nodes)])
        shapes.setdefault(node.meta["label"], set()).add(kind)
    assert {label: kinds for label, kinds in shapes.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize(("plan", "devices"), [
    slow("tp2xsplits2", 2), slow("dp2xtp2xsplits2", 4), slow("zero3xsplits2", 2), ("pp2xsplits2", 2),
    slow("tp2xrecomputexsplits2", 2),
])  # fmt: skip
def test_a_plan_by_its_name(plan, devices):
    model, batch, loss = MODELS["llama"]()
    one = copy.deepcopy(model)
    options = {"loss": loss, "level": "O0", "accumulate": 2 if "pp" in plan else 1}
    ours = tutti.parallelize(model, adam(model), batch, cluster=f"h100:{devices}", plan=plan, **options)
    whole = tutti.parallelize(one, adam(one), batch, cluster="cpu:1", plan="single", **options)
    for key, value in whole.gradients(batch).items():
        assert (ours.gradients(batch)[key] - value).norm() <= 1e-5 * value.norm() + 1e-9, key
    for _ in range(2):
        assert ours(batch).item() == pytest.approx(whole(batch).item(), rel=1e-5)
    assert ours.evaluate(batch).item() == pytest.approx(whole.evaluate(batch).item(), rel=1e-5)
    assert ours.plan.name == plan and "the batch is cut into 2 copies" in ours.plan.explain()
    assert Plan.from_json(ours.plan.to_json()) == ours.plan
    assert "- batch_splits: 2" in ours.plan.diff(ours.plan.replace(batch_splits=1))


def test_what_cannot_be_cut_is_an_error():
    assert copied(graph("llama"), 1) is graph("llama")
    with pytest.raises(ValueError, match=r"into 5 copies: they do not divide dim 0 of .*input_ids, \(\d+, \d+\)"):
        copied(graph("llama"), 5)
    with pytest.raises(ValueError, match="choose one"):
        vary(graph("llama"), Variant(sequence_chunks=2, batch_splits=2))
    with pytest.raises(ValueError, match="at least 2 copies"):
        parse_name("tp2xsplits1", 2)
    cluster = tutti.Cluster.parse("h100:2")
    with pytest.raises(ValueError, match="needs a step with 2 copies of the batch, not 1"):
        Planner(graph("llama"), cluster).named("tp2xsplits2")
    plan = Planner(graph("llama"), cluster).named("tp2")
    with pytest.raises(ValueError, match="the plan cuts the batch into 2 copies, the step into 1"):
        plan.replace(batch_splits=2).check(graph("llama"))
