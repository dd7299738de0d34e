"""The backward pass of LSTMs and experts uses what the forward pass kept, where both see the same tensors."""

import pytest
import torch
from torch import fx, nn

import models
import tutti
from tutti.lower.memory.workspace import keep_workspaces
from tutti.lower.shard import shard
from tutti.nn import MoE
from tutti.ops.workspaces import KEEPING, workspace_pairs
from tutti.plan.layouts.choice import Choice
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.textbook import parse_name
from tutti.tracing.capture import capture

ops = torch.ops.tutti
X = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(5, 8, num_layers=2, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0].pow(2).mean()


def lowered(choices):
    model = Tagger()
    graph = tutti.capture(model, (X,), torch.optim.SGD(model.parameters(), lr=0.1))
    operators = {}
    for node in graph.calls:
        kind = choices.get(node.target)
        if kind:
            operators[node.meta["label"]] = {"a": kind}
    program = shard(graph, Plan({"a": 2}, operators=operators), 0)
    keep_workspaces(program.graph)
    return [n.target for n in program.graph.nodes if n.op == "call_function"]


def test_unsplit_and_equally_split_layers_keep_their_workspace():
    batch = Choice("b")
    for choices in ({}, {ops.lstm_layer.default: batch, ops.lstm_layer_backward.default: batch}):
        targets = lowered(choices)
        assert targets.count(ops.lstm_layer_training.default) == 4
        assert targets.count(ops.lstm_layer_backward_kept.default) == 4
        assert ops.lstm_layer_backward.default not in targets


def test_unlike_splits_repeat_the_forward_pass():
    targets = lowered({ops.lstm_layer_backward.default: Choice("b")})
    assert targets.count(ops.lstm_layer_backward.default) == 4
    assert ops.lstm_layer_training.default not in targets


@pytest.mark.starts
def test_training_equals_plain_torch():
    model, reference = Tagger(), Tagger()
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), (X,), cluster="cpu:2", plan="dp2")
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        loss = reference(X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step((X,)), loss.detach())
    torch.testing.assert_close(step.state_dict(), dict(reference.state_dict()))


def counts_of_experts(layer, x, plan):
    model = layer.train()
    step = tutti.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), (x,), cluster="cpu:2", plan=plan,
                             level="O0", loss=lambda m, b: m(b[0] * 1.0)[0].square().mean())  # fmt: skip
    targets = [n.target for n in step.program.graph.nodes]
    return [targets.count(t) for t in (ops.experts_training.default, ops.experts_backward_kept.default)]


def test_experts_keep_their_rows_though_tokens_are_gathered_anew():
    for plan in ("dp2", "ep2", "tp2"):
        assert counts_of_experts(nn.Sequential(MoE(8, 12, 4, 2)), torch.randn(4, 6, 8), plan) == [1, 1], plan


def test_two_backward_passes_share_what_one_forward_pass_kept():
    graph = fx.Graph()
    x, index, weight, up, down, g, h = (graph.placeholder(n) for n in "xiwudgh")
    forward = graph.call_function(ops.experts.default, (x, index, weight, up, down, None, None, "silu", 0, 4, "", -1))
    both = [graph.call_function(ops.experts_backward.default, (y, *forward.args)) for y in (g, h)]
    for node in (forward, *both):
        node.meta = {"phase": "", "path": "", "label": "", "val": None}
    graph.output((forward, *both))
    keep_workspaces(graph)
    graph.lint()
    assert [n.target for n in both] == [ops.experts_backward_kept.default] * 2
    result = graph.find_nodes(op="output")[0].args[0][0]
    assert result.args == (forward, 0) and forward.target is ops.experts_training.default


def test_nothing_is_kept_for_a_layer_that_is_recomputed():
    """The rows of experts would need more memory than the activations that recomputation frees."""
    model, batch, loss = models.case("mixtral")
    targets = {}
    for plan in ("dp2", "dp2xrecompute", "dp2xrecompute-attention"):
        step = tutti.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss=loss, cluster="cpu:2", plan=plan, level="O0"
        )
        targets[plan] = {n.target for n in step.program.graph.nodes} & KEEPING
    assert targets["dp2"] and targets["dp2xrecompute-attention"] == targets["dp2"] and not targets["dp2xrecompute"]


@pytest.mark.parametrize("plan", ["dp2", "ep2", "tp2"])
def test_planned_memory_includes_the_workspace(plan):
    """A device keeps half of the rows of 2F numbers, one for each token and choice, whatever the axis splits."""
    model, x = nn.Sequential(MoE(64, 512, 4, 2)), torch.randn(8, 16, 64)
    step = capture(model, (x,), torch.optim.SGD(model.parameters(), lr=0.1),
                   loss=lambda m, b: m(b[0])[0].square().mean())  # fmt: skip
    ((forward, _, rule),) = workspace_pairs(step.graph)
    size = rule.size(forward)
    assert size == (8 * 16) * 2 * (2 * 512) * 4
    planner = Planner(step, tutti.Cluster.parse("cpu:2"))
    candidate = planner.textbook(parse_name(plan, 2))
    cost = candidate.joint.costs(candidate.chosen)[forward.meta["label"]]
    assert size / 2 <= cost.activations <= size / 2 + forward.meta["val"].bytes
