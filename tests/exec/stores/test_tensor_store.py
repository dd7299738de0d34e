"""What a step keeps is laid out as the plan says, and comes out whole."""

import pytest
import torch

import tutti
import zoo
from tutti.exec.runtimes.runtime import Virtual
from tutti.exec.stores import model_state
from tutti.exec.stores.tensor_store import Stored, TensorStore
from tutti.ir.spec import Spec
from tutti.plan.layouts.layout import Layout, Split, coordinates_of
from tutti.plan.planner import Planner


@pytest.fixture(scope="module")
def model():
    return zoo.gpt2(1)


@pytest.fixture(scope="module")
def graph(model):
    return tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()))


@pytest.fixture
def store(model, graph):
    plan = Planner(graph, tutti.Cluster.parse("cpu:4")).named("tp2xzero3")
    store = TensorStore(graph.device)
    store.spread(plan.mesh, Virtual(plan.mesh))
    store.declare(graph, plan)
    values = model_state.values_of(model, torch.optim.AdamW(model.parameters()), graph, False)
    store.begin((name, value.detach()) for name, value in values)
    return store


def test_only_what_outlives_a_step_is_kept(store, graph):
    assert {name.partition(":")[0] for name in store.tensors} == {"param", "exp_avg", "exp_avg_sq"}
    assert set(graph.state_names) == set(store.tensors)


def test_it_begins_with_the_tensors_of_the_model_in_parts(store, graph, model):
    for name, p in model.named_parameters():
        assert torch.equal(store.whole(f"param:{name}"), p), name
        assert not store.whole(f"exp_avg:{name}").any(), name
    name = "param:transformer.h.0.mlp.c_fc.weight"
    assert [part[name].numel() * 4 for part in store.parts] == [graph.spec(name).numel] * 4


def test_the_parts_are_not_the_models_own_memory(store, model):
    before = model.transformer.ln_f.weight.detach().clone()
    for part in store.parts:
        part["param:transformer.ln_f.weight"].fill_(7.0)
    assert torch.equal(model.transformer.ln_f.weight, before)


def test_a_placed_tensor_comes_out_whole(store, graph):
    for seed, name in enumerate(store.tensors):
        spec = graph.spec(name)
        tensor = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).to(spec.dtype)
        store.place(name, tensor)
        assert torch.equal(store.whole(name), tensor), name


def test_the_models_names_include_those_of_tied_parameters(store, graph, model):
    state = model_state.state_dict(store, model, dict(model.named_parameters()))
    assert list(state) == list(model.state_dict())
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])


def test_a_state_that_is_refused_changes_nothing(store):
    before = {name: store.whole(name) for name in store.tensors}
    wrong = {name: x + 1 for name, x in before.items()}
    wrong[list(store.tensors)[-1]] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"{list(store.tensors)[-1]} has \(3,\) torch.float32 in the state, \("):
        store.place_all(wrong)
    assert all(torch.equal(store.whole(name), x) for name, x in before.items())
    store.place_all({name: x + 1 for name, x in before.items()})
    assert all(torch.equal(store.whole(name), x + 1) for name, x in before.items())


def test_a_state_with_masters_says_so(store):
    state = {name: store.whole(name) for name in store.tensors}
    masters = {f"master:{name}": x for name, x in state.items()}
    with pytest.raises(ValueError, match="which is unknown; fp32_master_weights, stochastic_rounding or dtypes differ"):
        store.place_all(state | masters)


LAYOUTS = [
    ({"dp": 4}, {"dp": Split(0)}),
    ({"dp": 2, "tp": 2}, {"dp": Split(0), "tp": Split(1)}),
    ({"dp": 2, "tp": 2}, {"dp": Split(0, 6), "tp": Split(0)}),
    ({"dp": 2, "tp": 2}, {"tp": Split(1, 2)}),
    ({"tp": 4}, {}),
    ({"a": 2, "b": 2}, {"b": Split(2), "a": Split(2, 2)}),
]


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_moving_a_tensor_sends_what_is_missing_and_no_more(before, after):
    full = torch.randn(12, 8, 4)
    (mesh, placements), (other, wanted) = before, after
    old, new = Layout.of(placements), Layout.of(wanted)
    store = TensorStore(torch.device("cpu"))
    store.spread(mesh, Virtual(mesh))
    store.tensors["x"] = Stored("x", Spec.of(full), old)
    store.place("x", full)
    received = store.move_to({"x": new}, other)
    places = torch.arange(full.numel()).view(full.shape)
    missing = 0
    for rank in range(4):
        part = new.local_slice(full, other, coordinates_of(rank, other))
        assert torch.equal(store.parts[rank]["x"], part)
        had = set(old.local_slice(places, mesh, coordinates_of(rank, mesh)).flatten().tolist())
        needs = set(new.local_slice(places, other, coordinates_of(rank, other)).flatten().tolist())
        missing += 4 * len(needs - had)
    assert received == missing
    assert torch.equal(store.whole("x"), full)
