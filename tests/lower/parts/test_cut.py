"""Cutting: the parts together are the step, and the backward pass is split where nobody waits."""

import pytest
import torch

import tutti
import zoo
from pipelines import function_graph, random_stages
from tutti.ir.costs import FREE
from tutti.ir.step_graph import BACKWARD
from tutti.lower.parts.cut import Place, cut

HALVES = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama()
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()), clip_norm=1.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("split", [False, True])
def test_every_part_runs_and_together_they_make_all_outputs(graph, seed, split):
    cutting = cut(graph, random_stages(graph, 2 + seed % 3, seed), split)
    there, outputs = set(graph.inputs), []
    for part in cutting.parts.values():
        part.graph.lint()
        assert set(part.inputs) <= there, "parts stand in an order in which they can run"
        there |= set(part.outputs)
        outputs += [name for name in part.outputs if not name.startswith("value:")]
    assert sorted(outputs) == sorted(graph.outputs)


def sent(cutting, place):
    """Names of what other stages read of a part."""
    readers = {
        name: {r.stage for r in cutting.readers.get(name, ())} - {place.stage} for name in cutting.parts[place].outputs
    }
    return [name for name, stages in readers.items() if stages]


def test_a_layer_hands_on_one_tensor_each_way(graph):
    cutting = cut(graph, HALVES)
    assert len(sent(cutting, Place(0, "F"))) == len(sent(cutting, Place(1, "B"))) == 1, "the residual stream"


def test_gradients_that_nobody_waits_for_stand_apart(graph):
    whole, split = cut(graph, HALVES), cut(graph, HALVES, split=True)
    apart = split.parts[Place(1, "W")]
    assert all(n.meta["phase"] == BACKWARD or n.target in FREE for n in apart.calls), "but for views"
    products = [n.meta["path"] for n in apart.calls if n.target is torch.ops.aten.mm.default]
    assert len(set(products)) == len(products) == 7, (
        "of seven matrices of the layer; the head has its own with the loss"
    )
    assert set(whole.parts[Place(1, "B")].outputs) >= set(apart.outputs)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_norm_of_all_gradients_crosses_stages_as_single_numbers(kind):
    model = zoo.llama()
    cutting = cut(tutti.capture(model, zoo.tokens(), kind(model.parameters(), lr=0.1), clip_norm=1.0), HALVES)
    crossing = [cutting.parts[p].outputs[name].meta["val"].shape for p in cutting.parts if p.kind.startswith("U")
                for name in sent(cutting, p)]  # fmt: skip
    assert crossing and all(shape == () for shape in crossing)


def test_a_gradient_is_made_where_its_parameter_is_at_home(graph):
    """That of the embedding table, which reads nothing of its stage but the batch."""
    cutting = cut(graph, {"model.embed_tokens": 0, "model.layers": 1})
    assert cutting.makers["grad:model.embed_tokens.weight"].stage == 0
    for name in graph.gradient_names:
        assert cutting.makers[name].stage == cutting.homes[name.replace("grad:", "param:")]


# -- functions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def function():
    """The first half is updated on the way, but read again afterwards as it was; a copy of it is stored elsewhere."""
    torch.manual_seed(0)
    halves = {name: torch.nn.Linear(8, 8) for name in ("first", "second", "copy")}
    optimizer = torch.optim.AdamW(halves["first"].parameters(), lr=0.1)

    def update(x):
        optimizer.zero_grad()
        hidden = halves["first"](x)
        with torch.no_grad():
            again = halves["first"](halves["second"](hidden)) + halves["copy"](x)
        hidden.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            halves["copy"].weight.copy_(halves["first"].weight)
        return again

    return function_graph(update, torch.zeros(4, 8), **halves, optimizer=optimizer)


STAGES = {"first": 0, "second": 1, "copy": 1}


@pytest.mark.parametrize("seed", range(4))
def test_the_parts_of_a_function_make_all_outputs(function, seed):
    cutting = cut(function, random_stages(function, 3, seed) if seed else STAGES)
    there, outputs = set(function.inputs), []
    for place, part in cutting.parts.items():
        part.graph.lint()
        assert set(part.inputs) <= there, "parts stand in an order in which they can run"
        there |= set(part.outputs)
        outputs += [name for name in part.outputs if not name.startswith("value:")]
        stored = [name for name in part.outputs if name in function.inputs]
        assert {cutting.homes[name] for name in stored} <= {place.stage}
        assert place.once and str(place).startswith(f"stage {place.stage} C")
    assert sorted(outputs) == sorted(function.outputs)


def test_a_part_does_not_write_into_what_is_read_later(function):
    cutting = cut(function, STAGES)
    assert list(cutting.parts) == [(0, "C0", 0), (1, "C0", 0), (1, "C1", 0), (0, "C2", 0), (1, "C3", 0)]
    later = {place: {name for name, node in part.inputs.items()
                     if name in cutting.homes and node.meta.get("read_later")}
             for place, part in cutting.parts.items()}  # fmt: skip
    assert later[Place(0, "C0")] == {"param:first.weight", "param:first.bias"} and not later[Place(0, "C2")]
    assert "exp_avg:first.weight" in cutting.parts[Place(0, "C0")].inputs, "which may be written over"


def test_a_tensor_is_returned_on_the_stage_that_stores_it():
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    @torch.no_grad()
    def exchange(x):
        y, old = second(first(x)), first.weight.clone()
        first.weight.copy_(second.weight)
        second.weight.copy_(old)
        return y

    graph = function_graph(exchange, torch.zeros(4, 8), first=first, second=second)
    cutting = cut(graph, {"first": 0, "second": 1})
    for name in graph.state_names:
        assert cutting.makers[name].stage == cutting.homes[name]
    (place,) = (place for place, part in cutting.parts.items() if not part.calls)
    assert place == cutting.makers["param:first.weight"] and len(cutting.parts[place].inputs) == 1, "it only stores"
