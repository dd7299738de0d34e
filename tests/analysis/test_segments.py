"""Segments: what lies between two collectives, compiled once for all that are equal."""

import pytest
import torch
from torch import fx

from tutti import compat
from tutti.analysis import segments
from tutti.analysis.fusing import kernels
from tutti.analysis.segments import LARGEST, LAYER, SMALLEST, gather_kernels, gather_layers, stretches
from tutti.compile import segment_calls
from tutti.compile.segment_calls import compile_segments
from tutti.exec.kernels.codegen import generate
from tutti.exec.runtimes.virtual import run_virtual
from tutti.ir.spec import Spec
from tutti.lower.collectives import COLLECTIVES, all_reduce
from tutti.lower.variants.decompose import write_out

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """A compiler that only counts, and knows nothing from before."""
    graphs = []
    monkeypatch.setattr(segment_calls, "COMPILED", {})
    monkeypatch.setattr(
        compat, "compile_graph", lambda graph, args, modules: graphs.append(graph) or fx.GraphModule({}, graph)
    )
    return graphs


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
    node.meta = {"val": Spec((4,), torch.float32), "label": "x", "phase": "forward", "path": ""}
    return node


def run(graph):
    return run_virtual([generate(graph)] * 2, [(torch.ones(4),), (torch.ones(4) * 2,)], {"dp": 2})


def test_equal_segments_are_compiled_once(uncompiled):
    graph = layers(5)
    expected = run(graph)
    compile_segments(graph, "O2")
    graph.lint()
    calls = [n for n in graph.nodes if n.op == "call_function"]
    assert len([n for n in calls if n.target in COLLECTIVES]) == 5 and len(calls) == 15
    torch.testing.assert_close(run(graph), expected)
    assert len(uncompiled) == 1


def test_other_programs_share_what_is_compiled(uncompiled):
    for depth in (1, 3):
        graph = layers(depth)
        compile_segments(graph, "O2")
        run(graph)
    assert len(uncompiled) == 1


def test_small_segments_are_left_alone(uncompiled):
    graph = layers(2, SMALLEST - 1)
    compile_segments(graph, "O2")
    assert segment_calls.COMPILED == {} and aten.sin.default in [n.target for n in graph.nodes]


def of_layers(paths):
    """A chain of elementwise operators that belong to these modules."""
    graph = fx.Graph()
    x = first = graph.placeholder("x")
    x.meta["val"] = Spec((4,), torch.float32)
    for path in paths:
        x = call(graph, aten.sin.default, first if path == "outside" else x)
        x.meta["path"] = path
    graph.output((x,))
    return graph


def test_layers_that_are_alike_are_segments_of_their_own():
    paths = ["embed"] * 5 + ["h.0"] * LAYER + ["h.1"] * LAYER + ["h.2"] * (LAYER + 1) + ["head"] * 4
    pieces = segments.segments(of_layers(paths), "O2")
    assert [len(calls) for calls in pieces] == [5, LAYER, LAYER, LAYER + 1 + 4]


def test_short_layers_are_compiled_together():
    paths = [f"{i}" for i in range(12) for _ in range(LAYER - 1)]
    assert [len(calls) for calls in segments.segments(of_layers(paths), "O2")] == [len(paths)]


def test_unlike_layers_are_parted_where_a_function_gets_too_long():
    sizes = [LARGEST // 2 - 20, LARGEST // 2 - 10, LARGEST // 2 - 5]
    paths = [f"h.{i}" for i, size in enumerate(sizes) for _ in range(size)]
    assert [len(calls) for calls in segments.segments(of_layers(paths), "O2")] == [sizes[0] + sizes[1], sizes[2]]


def test_what_belongs_to_no_layer_does_not_part_one():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Spec((4,), torch.float32)
    a = call(graph, aten.sin.default, x)
    foreign = call(graph, aten.cos.default, x)
    b = call(graph, aten.add.Tensor, a, foreign)
    bound = call(graph, aten.cos.default, b)
    c = call(graph, aten.add.Tensor, b, bound)
    graph.output((c,))
    for node in (a, b, c):
        node.meta["path"] = "h.0.mlp"
    gather_layers(graph)
    graph.lint()
    assert [n for n in graph.nodes if n.op == "call_function"] == [foreign, a, b, bound, c]


def test_kernels_are_brought_together_and_products_are_not_in_them(uncompiled):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Spec((4, 4), torch.float32)

    def square(target, *args):
        node = call(graph, target, *args)
        node.meta["val"] = Spec((4, 4), torch.float32)
        return node

    a = square(aten.sin.default, x)
    p = square(aten.mm.default, x, x)
    b = square(aten.cos.default, a)
    c = square(aten.add.Tensor, p, b)
    d = square(aten.exp.default, c)
    turned = square(aten.transpose.int, d, 0, 1)
    graph.output((d, turned, square(aten.mm.default, turned, d)))
    inputs = [(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),)]
    expected = run_virtual([generate(graph)], inputs, {"dp": 1})
    gather_kernels(graph)
    graph.lint()
    assert segments.segments(graph, "O1") == [[a, b], [c, d]]
    compile_segments(graph, "O1")
    torch.testing.assert_close(run_virtual([generate(graph)], inputs, {"dp": 1}), expected)
    assert len(uncompiled) == 2


def test_one_number_does_not_join_what_reads_it():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = Spec((4,), torch.float32)
    norm = call(graph, aten.sum.default, x)
    root = call(graph, aten.sqrt.default, norm)
    norm.meta["val"] = root.meta["val"] = Spec((), torch.float32)
    scaled = [[a := call(graph, aten.mul.Tensor, z, root), call(graph, aten.neg.default, a)] for z in (x, y)]
    graph.output(tuple(b for _, b in scaled))
    assert kernels([norm, root, *scaled[0], *scaled[1]]) == [[norm], [root], *scaled]


def test_functions_are_compiled_anew_for_another_order_in_memory(uncompiled):
    graph = layers(1)
    compile_segments(graph, "O2")
    (function,) = segment_calls.COMPILED.values()
    for x in (torch.ones(4), torch.ones(4), torch.ones(8)[::2]):
        torch.testing.assert_close(function(x)[0], torch.ones(4).sin().sin().sin())
    assert len(uncompiled) == 2


def test_what_is_computed_again_of_a_layer_begins_a_segment():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Spec((4,), torch.float32)
    paths = ["", "", "layers.1", "layers.1.mlp", "", "layers.1", "", "layers.0", "layers.0.mlp", ""]
    for i, path in enumerate(paths):
        x = call(graph, aten.sin.default, x)
        x.meta |= {"path": path, "number": i} | ({"recompute": "sin"} if path else {})
    graph.output((x,))
    numbers = [[node.meta["number"] for node in segment] for segment in stretches(graph)]
    assert numbers == [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]


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
    write_out(graph)
    assert torch.ops.tutti.uniform.default not in [n.target for n in graph.nodes]
    assert torch.equal(result(), expected)


def test_salts_do_not_tell_layers_apart():
    """Dropout in each layer, with numbers of its own."""
    graph = fx.Graph()
    x, seed, step = (graph.placeholder(name) for name in ("x", "seed", "step"))
    x.meta["val"] = Spec((4, 6), torch.float32)
    seed.meta["val"] = step.meta["val"] = Spec((), torch.int64)

    def of_layer(target, *args, **kwargs):
        node = graph.call_function(target, args, kwargs)
        node.meta = {"val": Spec((4, 6), torch.float32), "label": "x", "phase": "forward", "path": f"h.{layer}"}
        return node

    for layer in range(3):
        where = [4, 6], [24], [1], 0
        u = of_layer(torch.ops.tutti.uniform.default, seed, step, layer, *where, device=torch.device("cpu"))
        x = of_layer(aten.mul.Tensor, x, u)
        for _ in range(LAYER):
            x = of_layer(aten.sin.default, x)
    graph.output((x,))
    inputs = [(torch.ones(4, 6), torch.tensor(3), torch.tensor(5))]
    expected = run_virtual([generate(graph)], inputs, {"dp": 1})
    write_out(graph)
    compile_segments(graph, "O2")
    graph.lint()
    assert len(segment_calls.COMPILED) == 1 and sum(n.name.startswith("segment") for n in graph.nodes) == 3
    torch.testing.assert_close(run_virtual([generate(graph)], inputs, {"dp": 1}), expected)
