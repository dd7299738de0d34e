"""An LSTM's backward pass uses what the forward pass kept, where both see the same tensors."""

import torch
from torch import nn

import tutti
from tutti.lower.shard import shard
from tutti.lower.workspace import keep_workspaces
from tutti.plan.choice import Choice
from tutti.plan.plan import Plan

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
