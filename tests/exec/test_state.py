"""What a step keeps is laid out as the plan says, and comes out whole."""

import pytest
import torch

import tutti
import zoo
from tutti.exec.runtime import Virtual
from tutti.exec.state import State
from tutti.plan.planner import Planner


@pytest.fixture(scope="module")
def model():
    return zoo.gpt2(1)


@pytest.fixture(scope="module")
def graph(model):
    return tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()))


@pytest.fixture
def state(model, graph):
    plan = Planner(graph, tutti.Cluster.parse("cpu:4")).named("tp2xzero3")
    return State(graph, plan, Virtual(plan.mesh)).begin(
        model, torch.optim.AdamW(model.parameters()), fp32_master_weights=False
    )


def test_only_what_outlives_a_step_is_kept(state, graph):
    assert {name.partition(":")[0] for name in state.names} == {"param", "exp_avg", "exp_avg_sq"}
    assert set(graph.state_names) == set(state.names)


def test_it_begins_with_the_tensors_of_the_model_in_parts(state, model):
    for name, p in model.named_parameters():
        assert torch.equal(state.whole(f"param:{name}"), p), name
        assert not state.whole(f"exp_avg:{name}").any(), name
    name = "param:transformer.h.0.mlp.c_fc.weight"
    assert [held[name].numel() * 4 for held in state.parts] == [state.graph.spec(name).numel] * 4


def test_the_parts_are_not_the_models_own_memory(state, model):
    before = model.transformer.ln_f.weight.detach().clone()
    for held in state.parts:
        held["param:transformer.ln_f.weight"].fill_(7.0)
    assert torch.equal(model.transformer.ln_f.weight, before)


def test_a_placed_tensor_comes_out_whole(state):
    for seed, name in enumerate(state.names):
        spec = state.graph.spec(name)
        given = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).to(spec.dtype)
        state.place(name, given)
        assert torch.equal(state.whole(name), given), name


def test_outputs_that_succeed_nothing_are_not_kept(state):
    name = "param:transformer.ln_f.weight"
    new = [{name: torch.full_like(held[name], 3.0), "loss": torch.tensor(1.0)} for held in state.parts]
    state.keep(new)
    assert torch.equal(state.whole(name), torch.full((64,), 3.0)) and "loss" not in state.parts[0]


def test_the_models_names_include_those_of_tied_parameters(state, model):
    found = state.of_model(model, sharded=False)
    assert list(found) == list(model.state_dict())
    assert torch.equal(found["lm_head.weight"], found["transformer.wte.weight"])


def test_a_state_that_is_refused_changes_nothing(state):
    before = {name: state.whole(name) for name in state.names}
    wrong = {name: x + 1 for name, x in before.items()}
    wrong[state.names[-1]] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"{state.names[-1]} has \(3,\) torch.float32 in the state, \("):
        state.load(wrong)
    assert all(torch.equal(state.whole(name), x) for name, x in before.items())
    state.load({name: x + 1 for name, x in before.items()})
    assert all(torch.equal(state.whole(name), x + 1) for name, x in before.items())


def test_a_state_with_masters_says_so(state):
    given = {name: state.whole(name) for name in state.names}
    masters = {f"master:{name}": x for name, x in given.items()}
    with pytest.raises(ValueError, match="which is unknown; masters, stochastic_rounding or dtypes are not those"):
        state.load(given | masters)
