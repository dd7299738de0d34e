"""Names, parts and fingerprint of a StepGraph."""

import pytest
import torch
from torch import fx

import tutti
import zoo
from tutti.ir.spec import Spec
from tutti.ir.step_graph import replace_uses


@pytest.fixture(scope="module")
def graph():
    model = zoo.gpt2(1)
    return tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()), clip_norm=1.0)


def test_spec():
    assert Spec.of(torch.zeros(2, 3, dtype=torch.bfloat16)) == Spec((2, 3), torch.bfloat16)
    assert str(Spec((4, 8), torch.float32)) == "float32[4, 8]" and str(Spec((), torch.bool)) == "bool[]"
    assert Spec.of([torch.zeros(2), None]) == (Spec((2,), torch.float32), None) and Spec.of(1.5) is None
    assert Spec((2, 3), torch.bfloat16).bytes == 12 and Spec((), torch.int64).numel == 1


def test_names(graph):
    model = zoo.gpt2(1)
    assert graph.names("param") == [name for name, _ in model.named_parameters()]
    assert graph.names("batch") == ["input_ids", "labels"]
    kinds = {name.split(":")[0] for name in graph.state_names}
    assert kinds == {"param", "exp_avg", "exp_avg_sq"}
    assert graph.gradient_names == [f"grad:{name}" for name in graph.names("param")]
    assert graph.gradient_label("transformer.h.0.ln_1.weight") == "grad:transformer.h.*.ln_1.weight"


def test_keep_computes_only_what_is_named(graph):
    part = graph.keep(["loss"])
    assert list(part.outputs) == ["loss"] and list(part.inputs) == list(graph.inputs)
    assert {n.meta["phase"] for n in part.calls} == {"forward"} and part.flops < graph.flops / 2
    assert len(graph.outputs) > 1, "the graph itself is left as it was"


def test_cut_at_gradients(graph):
    before, after = graph.at_gradients()
    assert {n.meta["phase"] for n in before.calls} == {"forward", "backward"}
    assert {n.meta["phase"] for n in after.calls} == {"update"}
    assert set(before.outputs) == {"loss", *graph.gradient_names}
    assert set(after.outputs) == {"grad_norm", *graph.state_names} and set(graph.gradient_names) <= set(after.inputs)
    assert before.flops + after.flops == graph.flops


def test_fingerprint_tells_graphs_apart(graph):
    model = zoo.gpt2(1)
    again = tutti.capture(model, zoo.tokens(4), torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    larger = tutti.capture(model, zoo.tokens(8), torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    assert again.fingerprint == graph.fingerprint != larger.fingerprint
    assert len(graph.fingerprint) == 16


def test_who_reads_one_of_many_reads_another_then():
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    both = graph.call_function(torch.cat, ([a, b, c], 0))
    first = graph.call_function(torch.neg, (a,))
    out = graph.output((both, a))
    replace_uses({a: c, b: first})
    assert (both.args, first.args, out.args) == (([c, first, c], 0), (c,), ((both, c),)) and not a.users and not b.users
