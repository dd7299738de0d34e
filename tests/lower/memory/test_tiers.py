"""Programs that use tiers: what is fetched where, who writes where, and when."""

from __future__ import annotations

import pytest
import torch

import tutti
import zoo
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE
from tutti.lower.memory.early_updates import overwritten
from tutti.lower.memory.tiers import use_tiers
from tutti.lower.memory.transfers import TRANSFERS, arrived, fetch, lend, put, store
from tutti.lower.shard import shard
from tutti.plan.plan import Plan
from tutti.plan.tier import DISK, HOST, offloaded

ADAM = torch.ops.tutti.adam_.default


def graph(most, tier=DISK, optimizer=torch.optim.AdamW, layers=3, **options):
    model = zoo.llama(layers)
    step = tutti.capture(model, zoo.tokens(4), optimizer(model.parameters(), lr=0.1), **options)
    step = step.keep([name for name in step.outputs if name not in step.gradient_names])
    plan = Plan({"dp": 1}, tiers=offloaded(step, most, tier) if most else {})
    plan.check(step)
    program = shard(step, plan, 0)
    use_tiers(program.graph)
    program.graph.lint()
    return program.graph


def calls(graph, *targets):
    return [node for node in graph.nodes if node.target in targets]


def test_without_tiers_nothing_changes():
    plain = graph(0)
    assert not calls(plain, *TRANSFERS) and not calls(plain, ADAM)


def test_each_parameter_is_updated_where_its_state_lies_as_soon_as_its_gradient_is_there():
    offloaded = graph(1)
    at = {node: i for i, node in enumerate(offloaded.nodes)}
    updates = calls(offloaded, ADAM)
    assert len(updates) == sum(n.meta.get("input", "").startswith("exp_avg:") for n in offloaded.nodes)
    assert all(x.op == "placeholder" for node in updates for x in overwritten(node)), "none is copied"
    assert not calls(offloaded, *TRANSFERS), "a CPU and its disk share memory"
    last_backward = max(at[n] for n in offloaded.nodes if n.meta.get("phase") == BACKWARD)
    early = [node for node in updates if at[node] < last_backward]
    assert len(early) > len(updates) / 2
    for node in updates:
        for old in overwritten(node):
            later = [user for user in old.users if at[user] > at[node] and user.op == "call_function"]
            assert all(user.args[0] is node for user in later), "nobody reads the old value from then on"


def test_parameters_are_fetched_for_each_pass_one_layer_ahead():
    offloaded = graph(2)
    at = {node: i for i, node in enumerate(offloaded.nodes)}
    inputs = {n: n.meta["input"] for n in offloaded.nodes if n.op == "placeholder"}
    weights = [n for n, name in inputs.items() if name.startswith("param:model.layers.1.mlp")]
    layer = [n for n in offloaded.nodes if ".layers.1" in n.meta.get("path", "") and n.target not in TRANSFERS]
    first = {p: min(at[n] for n in layer if n.meta["phase"] == p) for p in (FORWARD, BACKWARD)}
    for weight in weights:
        copies = [user for user in weight.users if user.target is fetch]
        assert [copy.meta["phase"] for copy in copies] == [FORWARD, BACKWARD]
        for copy in copies:
            (there,) = copy.users
            assert there.target is arrived and at[copy] < first[copy.meta["phase"]] < at[there]
        readers = {user.target for user in weight.users} - {fetch}
        assert len(readers) == 2 and ADAM in readers, "else only the update reads it, and what says that it is written"


def test_results_wait_elsewhere_for_the_backward_pass():
    offloaded = graph(3)
    aside = calls(offloaded, put)
    assert aside and all(node.meta["phase"] == FORWARD for node in aside)
    for node in aside:
        assert {user.target for user in node.users} == {fetch}
        for user in node.args[0].users:
            assert user is node or user.meta["phase"] != BACKWARD, "the backward pass reads what was fetched"


def test_the_host_is_lent_gradients_and_gives_parameters_back():
    offloaded = graph(1, HOST)
    updates = calls(offloaded, ADAM)
    assert all(node.meta["host"] == HOST for node in updates)
    params = [n for n in offloaded.nodes if n.meta.get("input", "").startswith("param:")]
    assert len(calls(offloaded, lend)) == 2 * len(updates), "a gradient and a parameter for each"
    assert {node.args[0] for node in calls(offloaded, store)} == {p for p in params if p.users}


def test_other_optimizers_store_what_they_make():
    offloaded = graph(2, DISK, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    homes = {node.args[0].meta["input"] for node in calls(offloaded, store)}
    assert {name.partition(":")[0] for name in homes} == {"param", "momentum_buffer"}


def test_clipped_updates_wait_for_the_norm():
    offloaded = graph(1, clip_norm=1.0)
    at = {node: i for i, node in enumerate(offloaded.nodes)}
    last = max(at[n] for n in offloaded.nodes if n.meta.get("phase") == BACKWARD)
    assert all(at[node] > last and node.meta["phase"] == UPDATE for node in calls(offloaded, ADAM))


@pytest.mark.parametrize("tiers, message", [
    ({"param:model.norm.weight": "attic"}, "a tier is one of device, host, disk"),
    ({"batch:input_ids": "disk"}, "a batch is stored on the device"),
    ({"param:nothing": "disk"}, "does not have"),
])  # fmt: skip
def test_what_cannot_lie_there_is_refused(tiers, message):
    model = zoo.llama(1)
    step = tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=message):
        Plan({"dp": 1}, tiers=tiers).check(step)


def test_only_what_the_forward_pass_makes_can_wait():
    model = zoo.llama(1)
    step = tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()))
    label = next(n.meta["label"] for n in step.calls if n.meta["phase"] == BACKWARD)
    with pytest.raises(ValueError, match="which the backward pass makes"):
        Plan({"dp": 1}, tiers={label: DISK}).check(step)
