"""Plans are saved, read, compared, checked and explained."""

import json
import re

import pytest
import torch

import tutti
import zoo
from searches import predicted
from tutti.plan.layouts.choice import Choice
from tutti.plan.layouts.layout import Layout, Split
from tutti.plan.plan import Plan, Prediction
from tutti.plan.planner import Planner


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(1)
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))


@pytest.fixture(scope="module")
def plan(graph):
    return predicted(graph, "cpu:4", "tp2xzero3")


def test_json_round_trip(plan, tmp_path):
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads(plan.to_json())["mesh"] == {"dp": 2, "tp": 2}


def test_a_random_plan_survives_json(graph):
    drawn = tutti.random_plan(graph, 8, 3)
    assert Plan.from_json(drawn.to_json()) == drawn


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a plan: Expecting property name"),
        ("[]", "a plan is an object with the keys .* found list"),
        ('{"inputs": {}}', "a plan is an object with the keys"),
        ('{"mesh": {}, "operator": {}}', r"found \['operator'\]"),
        ('{"mesh": {"a": 2}, "inputs": {"x": {"a": "S"}}}', "no placement 'S'"),
        ('{"mesh": {"a": 2}, "inputs": {"x": "S0"}}', "not a plan: 'str' object has no attribute 'items'"),
        ('{"mesh": {"a": 2}, "prediction": {"hours": 1}}', "not a plan: .*hours"),
    ],
)
def test_what_is_not_a_plan_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def test_diff_names_what_changed(plan):
    assert plan.diff(plan) == []
    norm = "param:model.norm.weight"
    other = plan.replace(inputs={**plan.inputs, norm: Layout()}, mesh={"dp": 4, "tp": 2}, accumulate=2)
    assert plan.diff(other) == [
        "- dp: 2", "+ dp: 4", "- accumulate: 1", "+ accumulate: 2", f"- {norm}: {plan.inputs[norm]}", f"+ {norm}: R",
    ]  # fmt: skip


def test_check_names_the_nearest_label_and_a_missing_axis(plan, graph):
    plan.check(graph)
    with pytest.raises(ValueError, match=r"'param:model.norm.weigth'.*the nearest is 'param:model.norm.weight'"):
        plan.replace(inputs={"param:model.norm.weigth": Layout()}).check(graph)
    label = next(iter(plan.operators))
    with pytest.raises(ValueError, match=r"over axis 'pp'; its mesh has \['dp', 'tp'\]"):
        plan.replace(operators={label: {"pp": Choice("m")}}).check(graph)
    with pytest.raises(ValueError, match="over axis 'pp'"):
        plan.replace(inputs={"param:model.norm.weight": Layout.of({"pp": Split(0)})}).check(graph)


def captured(optimizer=torch.optim.AdamW, dtype=torch.float32, **options):
    model = zoo.llama(1).to(dtype)
    return tutti.capture(model, zoo.tokens(), optimizer(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            {},
            {"optimizer": torch.optim.SGD},
            r"an optimizer that keeps exp_avg, exp_avg_sq of model.embed_tokens.weight, this one does not",
        ),
        (
            {"dtype": torch.bfloat16, "fp32_master_weights": True},
            {"dtype": torch.bfloat16},
            r"a step with float32 masters \(fp32_master_weights=True\), this one has none",
        ),
        (
            {"clip_norm": 1.0},
            {},
            r"made for another update: another clip_norm, masters or options of the optimizer \('",
        ),
    ],
)
def test_a_plan_for_another_update_says_what_was_other(then, now, message):
    planned = Planner(captured(**then), tutti.Cluster.parse("cpu:2")).named("zero1")
    with pytest.raises(ValueError, match=message + ".*build the step as before, or search a new plan"):
        planned.check(captured(**now))


@pytest.mark.parametrize("size", [-3, 1, True, "8", 3.5, None])
def test_a_node_of_experts_has_at_least_two_devices(plan, graph, size):
    with pytest.raises(ValueError, match=r"node_size .*: a node has at least 2 devices"):
        plan.replace(node_size=size).check(graph)


def test_weights_are_rounded_only_for_products_in_low_precision(plan, graph):
    with pytest.raises(ValueError, match="reround is for weights of products in low precision"):
        plan.replace(reround=True).check(graph)
    with pytest.raises(ValueError, match="reround 'no': true, or false"):
        plan.replace(reround="no", matmul_dtype="float8").check(graph)


def test_explain(plan):
    text = plan.replace(reasons=("because it fits",)).explain()
    lines = text.splitlines()
    assert lines[0] == "plan tp2xzero3: mesh dp 2 x tp 2 on cpu:4"
    assert any(line.startswith("predicted step") and "computing" in line and "waiting for" in line for line in lines)
    memory = next(line for line in lines if line.startswith("predicted memory"))
    assert all(kind in memory for kind in ("parameters", "optimizer state", "activations", "other"))
    assert any(line.split()[:3] == ["all_gather", "over", "dp"] for line in lines)
    row = next(line for line in lines if line.startswith("model.layers.*.mlp.up_proj.weight"))
    assert re.fullmatch(r"model.layers.\*.mlp.up_proj.weight +(dp:S(1|0/2) tp:S0 *){2}", row)
    assert any(line.split() == ["batch", "input_ids", "dp:S0"] for line in lines)
    assert lines[-2:] == ["why", "  because it fits"]
    assert max(map(len, lines)) <= 170 and len(lines) < 40


def test_explain_says_what_it_does_not_know():
    assert Plan({"dp": 1}).explain().splitlines() == [
        "plan (without a name): mesh dp 1", "", "everything is replicated on every device",
    ]  # fmt: skip
    sent = {"all_reduce over dp": [4, 1 << 30]}
    prediction = Prediction(2.5, 2.0, 0.5, 1 << 30, 0.4, 3 << 30, {"parameters": 3 << 30}, sent)
    assert Plan({"dp": 2}, accumulate=2, prediction=prediction).explain().splitlines()[1:6] == [
        "2 microbatches per update",
        "predicted step   2.5 s: 2 s computing, 500 ms waiting for communication; 40 % of peak",
        "predicted memory 3 GiB per device: parameters 3 GiB",
        "sent per step    1 GiB by each device",
        "  all_reduce over dp  4  1 GiB",
    ]


def test_equal_stages_share_a_line():
    stages = {"embed": 0, **{f"h.{i}": 1 + i // 2 for i in range(8)}, "head": 4}
    plan = Plan({"pp": 5}, stages=stages, schedule="1f1b", durations=((1, 2, 0, 0), *[(3, 4, 0, 0)] * 4), accumulate=5)
    lines = [line for line in plan.explain().splitlines() if " forward  " in line]
    assert [line.split() for line in lines] == [
        ["stage", "0", "1", "s", "forward", "2", "s", "backward", "embed"],
        ["3", "stages,", "1-3", "3", "s", "forward", "4", "s", "backward", "2", "layers", "each,", "h.0-5"],
        ["stage", "4", "3", "s", "forward", "4", "s", "backward", "h.6-7,", "head"],
    ]
