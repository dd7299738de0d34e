"""Collectives that could start together become one."""

import pytest
import torch
import transformers
from torch import fx

import tutti
from cases import crossed, slow
from tutti.exec.kernels.codegen import generate
from tutti.exec.runtimes.virtual import run_virtual
from tutti.ir.spec import Spec
from tutti.ir.step_graph import UPDATE
from tutti.lower.collectives import COLLECTIVES, all_gather, all_reduce, reduce_scatter
from tutti.lower.memory import inplace
from tutti.lower.overlap import bucket as module
from tutti.lower.overlap.bucket import bucket
from tutti.sim.dryrun import dry_run

aten = torch.ops.aten
MESH = {"dp": 2}


def program(target, rest, dtypes=(torch.float32,) * 3):
    """Three tensors are doubled, sent, and one is added to itself; all in the update."""
    graph, results = fx.Graph(), []
    shapes = [(2, 3), (2, 5, 2), (2,)]
    inputs = [graph.placeholder(f"x{i}") for i in range(3)]

    def emit(function, args, shape, dtype):
        node = graph.call_function(function, args)
        node.meta = {"val": Spec(tuple(shape), dtype), "phase": UPDATE, "label": "update", "path": ""}
        return node

    for x, shape, dtype in zip(inputs, shapes, dtypes, strict=True):
        x.meta = {"val": Spec(shape, dtype), "phase": "forward"}
        twice = emit(aten.mul.Tensor, (x, 2), shape, dtype)
        sent_shape = {all_reduce: shape, all_gather: (2, *shape), reduce_scatter: shape[1:]}[target]
        sent = emit(target, (twice, *rest), sent_shape, dtype)
        results.append(emit(aten.add.Tensor, (sent, sent), sent_shape, dtype))
    graph.output(tuple(results))
    return graph


def run(graph, dtypes=(torch.float32,) * 3):
    whole = zip((6, 20, 2), ((2, 3), (2, 5, 2), (2,)), dtypes, strict=True)
    parts = [torch.arange(n).view(shape).to(dtype) for n, shape, dtype in whole]
    inputs = [[part + rank for part in parts] for rank in range(2)]
    return run_virtual([generate(graph)] * 2, inputs, MESH)


def sent(graph):
    return [n for n in graph.nodes if n.target in COLLECTIVES]


KINDS = [
    (all_reduce, ("dp", "sum")),
    (all_reduce, ("dp", "max")),
    (all_gather, ("dp", 2)),
    (reduce_scatter, ("dp", "sum")),
]


@pytest.mark.parametrize(("target", "rest"), KINDS)
def test_one_collective_gives_what_three_gave(target, rest):
    graph = program(target, rest)
    expected = run(graph)
    bucket(graph)
    graph.lint()
    assert len(sent(graph)) == 1
    torch.testing.assert_close(run(graph), expected, rtol=0, atol=0)


def test_dtypes_are_not_mixed():
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    graph = program(all_reduce, ("dp", "sum"), dtypes)
    expected = run(graph, dtypes)
    bucket(graph)
    assert sorted(str(n.args[0].meta["val"].dtype) for n in sent(graph)) == ["torch.bfloat16", "torch.float32"]
    torch.testing.assert_close(run(graph, dtypes), expected, rtol=0, atol=0)


def test_pieces_are_no_larger_than_a_bucket(monkeypatch):
    monkeypatch.setattr(module, "BUCKET", 90)
    graph = program(all_reduce, ("dp", "sum"))
    bucket(graph)
    assert [n.args[0].meta["val"].bytes for n in sent(graph)] == [24, 88]


def test_the_forward_pass_is_left_alone():
    graph = program(all_reduce, ("dp", "sum"))
    for node in graph.nodes:
        node.meta["phase"] = "forward"
    bucket(graph)
    assert len(sent(graph)) == 3


def llama():
    """A model and a batch."""
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128,
                                      vocab_size=64)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(8 * 16).view(8, 16) % 64
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name, count", crossed(["zero1", "zero2", "zero3", "dp2xtp2"], [1, 2],
                                                quick=[("zero1", 2)]))  # fmt: skip
def test_gradients_are_reduced_as_soon_as_a_bucket_is_full(name, count, monkeypatch):
    def trained():
        model, batch = llama()
        step = tutti.parallelize(model, torch.optim.AdamW(model.parameters()), batch, cluster="cpu:4", plan=name,
                                 level="O0", accumulate=count, clip_norm=1.0)  # fmt: skip
        losses = [step(batch).item() for _ in range(3)]
        cluster = tutti.Cluster.parse("cpu:4")
        return losses, step.state_dict(), dry_run(step.graph, step.plan, cluster).memory

    losses, state, late = trained()
    monkeypatch.setattr(module, "BUCKET", 1 << 17)
    ours, after, early = trained()
    assert ours == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(after, state, rtol=1e-5, atol=1e-7)
    if name.startswith("zero") and (count == 1 or name != "zero1"):
        whole = sum(x.nbytes for key, x in state.items() if "." in key)
        assert early.peak < late.peak - whole // 4, "of the gradients no more than a bucket is whole"


@pytest.mark.parametrize("name", ["dp", slow("zero1"), slow("zero3"), "pp2xzero1", slow("pp2xtp2")])
def test_accumulated_gradients_are_reduced_in_buckets_too(name, monkeypatch):
    """In a Program of the update alone, where they are inputs and nothing couples them."""
    monkeypatch.setattr(inplace, "PIECE", 1)
    monkeypatch.setattr(module, "BUCKET", 1 << 14)

    def trained(cluster, plan):
        model, batch = llama()
        step = tutti.parallelize(model, torch.optim.AdamW(model.parameters()), batch, cluster=cluster, plan=plan,
                                 level="O0", accumulate=2)  # fmt: skip
        return [step(batch).item() for _ in range(3)], step.state_dict()

    losses, state = trained("cpu:1", "single")
    ours, after = trained("cpu:4", name)
    assert ours == pytest.approx(losses, rel=1e-5)
    for key, exact in state.items():
        assert (after[key] - exact).norm() <= 1e-5 * exact.norm(), key
