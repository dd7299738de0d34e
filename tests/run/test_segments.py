"""Segments: what lies between two collectives, compiled once for all that are equal."""

import pytest
import torch
from torch import fx

from tutti.graph.step_graph import Spec
from tutti.lower.collectives import COLLECTIVES, all_reduce
from tutti.run import segments
from tutti.run.code import generate
from tutti.run.segments import SMALLEST, compile_segments, inline_random
from tutti.run.virtual import run_virtual

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """A compiler that only counts, and knows nothing from before."""
    made = []
    monkeypatch.setattr(segments, "COMPILED", {})
    monkeypatch.setattr(torch, "compile", lambda module, **options: made.append(module) or module)
    return made


def layers(depth: int, length: int = SMALLEST):
    """Layers of elementwise operators, each followed by an all-reduce."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Spec((4,), torch.float32)
    for _ in range(depth):
        for _ in range(length):
            x = call(graph, aten.sin.default, x)
        x = call(graph, all_reduce, x, "dp", "sum")
    graph.output((x,))
    return graph


def call(graph, target, *args):
    node = graph.call_function(target, args)
    node.meta = {"val": Spec((4,), torch.float32), "label": "x", "phase": "forward"}
    return node


def run(graph):
    return run_virtual([generate(graph)] * 2, [(torch.ones(4),), (torch.ones(4) * 2,)], {"dp": 2})


def test_equal_segments_are_compiled_once(uncompiled):
    graph = layers(5)
    expected = run(graph)
    compile_segments(graph)
    graph.lint()
    assert len(uncompiled) == 1
    calls = [n for n in graph.nodes if n.op == "call_function"]
    assert len([n for n in calls if n.target in COLLECTIVES]) == 5 and len(calls) == 15
    torch.testing.assert_close(run(graph), expected)


def test_other_programs_share_what_is_compiled(uncompiled):
    compile_segments(layers(1))
    compile_segments(layers(3))
    assert len(uncompiled) == 1


def test_small_segments_are_left_alone(uncompiled):
    graph = layers(2, SMALLEST - 1)
    compile_segments(graph)
    assert uncompiled == [] and aten.sin.default in [n.target for n in graph.nodes]


def test_what_is_computed_again_of_a_layer_begins_a_segment():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Spec((4,), torch.float32)
    paths = ["", "", "layers.1", "layers.1.mlp", "", "layers.1", "", "layers.0", "layers.0.mlp", ""]
    for i, path in enumerate(paths):
        x = call(graph, aten.sin.default, x)
        x.meta |= {"path": path, "number": i} | ({"again": "sin"} if path else {})
    graph.output((x,))
    found = [[node.meta["number"] for node in segment] for segment in segments.segments(graph)]
    assert found == [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]


def test_random_operators_are_written_out_with_the_same_numbers():
    graph = fx.Graph()
    seed, step = graph.placeholder("seed"), graph.placeholder("step")
    seed.meta["val"] = step.meta["val"] = Spec((), torch.int64)
    device = torch.device("cpu")
    node = graph.call_function(
        torch.ops.tutti.uniform.default, (seed, step, 7, [4, 6], [24], [1], 0), {"device": device}
    )
    node.meta = {"val": Spec((4, 6), torch.float32)}
    graph.output((node,))

    def result():
        return run_virtual([generate(graph)], [(torch.tensor(3), torch.tensor(5))], {"dp": 1})[0][0]

    expected = result()
    inline_random(graph)
    assert torch.ops.tutti.uniform.default not in [n.target for n in graph.nodes]
    assert torch.equal(result(), expected)
