"""Attention on a GPU: on fake tensors here, the parts of every kernel have the shapes that the rule says.

The numbers are held against the whole where there is a GPU (tests/proofs/test_rules.py).
"""

import operator

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.check.machine import STATES
from tutti.check.samples.attention.attention_cuda import backward_call, call
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.lower.shard import by_token, shard
from tutti.ops import operands, rule_of, specs
from tutti.ops.attention.attention_cuda import BACKWARD, FORWARD
from tutti.plan.layouts.choice import Choice, layouts
from tutti.plan.layouts.layout import Layout
from tutti.plan.plan import Plan

MESH = {"a": 2}


def node_of(target, args) -> fx.Node:
    graph = fx.Graph()

    def placeholder(x):
        if not isinstance(x, torch.Tensor):
            return x
        operand = graph.placeholder("x")
        operand.meta["val"] = Spec.of(x)
        return operand

    node = graph.call_function(target, pytree.tree_map(placeholder, args))
    node.meta["val"] = Spec.of(target(*args))
    return node


def shapes_of(node, choice):
    """Whole and local shapes of operands and outputs."""
    ins, outs = layouts(rule_of(node), {"a": choice})
    local = [at.local_shape(n.meta["val"].shape, MESH) for at, n in zip(ins, operands(node), strict=True)]
    return local, [at.local_shape(s.shape, MESH) for at, s in zip(outs, specs(node), strict=True)]


def find(call: fx.Node, name: str) -> fx.Node:
    """An argument by its name."""
    names = [a.name for a in BACKWARD[1]._schema.arguments]
    return call.args[names.index(name)]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("factor", ["b", "g"])
@pytest.mark.parametrize("kernel", range(3))
@pytest.mark.parametrize("causal", [False, True])
def test_parts_have_the_shapes_of_the_rule(kernel, factor, causal):
    forward, backward = FORWARD[kernel], BACKWARD[kernel]
    with compat.fake_mode():
        q, k, v = (torch.empty(4, 6, 96, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        args = call(forward, q, k, v, None, causal)
        outputs = forward(*args)
        for target, inputs in (
            (forward, args),
            (backward, backward_call(backward, torch.empty_like(q), q, k, v, None, causal, outputs)),
        ):
            node = node_of(target, inputs)
            ins, outs = shapes_of(node, Choice(factor))
            parts = iter(ins)
            cut = pytree.tree_map(
                lambda x, parts=parts: x.new_empty(next(parts)) if isinstance(x, torch.Tensor) else x, inputs
            )
            part_outputs = target(*cut)
            assert [tuple(t.shape) for t in part_outputs if isinstance(t, torch.Tensor)] == [
                shape for shape, t in zip(outs, part_outputs, strict=True) if isinstance(t, torch.Tensor)
            ]
            assert len({d for shape in ins for d in shape}) > 1


def test_the_gradient_of_a_bias_has_no_rule():
    with compat.fake_mode():
        q = torch.empty(2, 4, 96, 64, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(2, 4, 96, 96, device="cuda", dtype=torch.bfloat16)
        outputs = FORWARD[1](q, q, q, bias, True)
        args = (q, q, q, q, bias, *outputs, 0.0, [True, True, True, True], False)
        assert rule_of(node_of(BACKWARD[1], args)) is None
        assert rule_of(node_of(FORWARD[1], (q, q, q, bias, True))) is not None


@pytest.mark.parametrize("biased", [False, True])
def test_the_backward_kernel_that_overlooks_strides_of_the_output_is_given_those_it_expects(biased):
    """A shard that was cut from a whole output has others: rows of all heads, or heads one after another."""
    with compat.fake_mode():
        q = torch.empty(2, 4, 96, 64, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(2, 4, 96, 96, device="cuda", dtype=torch.bfloat16) if biased else None
        outputs = FORWARD[1](q, q, q, bias, True)
        args = backward_call(BACKWARD[1], q, q, q, q, bias, False, outputs)
    node = node_of(BACKWARD[1], args)
    first = node.graph.call_function(operator.getitem, (node, 0))
    node.graph.output(first)
    inputs = {f"batch:{i}": x for i, x in enumerate(operands(node))}
    for name, x in inputs.items():
        x.meta |= {"phase": "forward", "path": "", "label": name}
    node.meta |= {"phase": "forward", "path": "", "label": "attention", "flops": 0, "bytes": 1}
    first.meta = {**node.meta, "val": node.meta["val"][0]}
    step = StepGraph(node.graph, inputs, {"out:0": first})
    plan = Plan(MESH, {name: Layout() for name in inputs}, {"attention": {"a": Choice("g")}})
    (call,) = shard(step, plan, 0).graph.find_nodes(op="call_function", target=BACKWARD[1])
    out, sums = (find(call, name) for name in ("out", "logsumexp"))
    assert out.target is by_token and sums.target is torch.ops.aten.contiguous.default
    part = torch.empty(2, 2, 96, 64)
    assert by_token(part).stride() == (96 * 2 * 64, 64, 2 * 64, 1) and by_token(part).shape == part.shape


@pytest.mark.parametrize("kernel", range(3))
def test_the_state_of_a_generator_is_found_by_its_name(kernel):
    """It is not compared: without dropout it is memory that nobody has written."""
    target = FORWARD[kernel]
    names = [r.name for r in target._schema.returns]
    assert len([name for name in names if name in STATES]) == 2
