"""A loss whose gradient is known before it is makes its own gradients, and its logits once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti

ops = torch.ops.tutti
CLASSES = 24


class Scored(nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.loss = loss

    def forward(self, x, labels):
        return self.loss(F.cross_entropy(self.head(self.body(x).relu()), labels))


def trained(loss, cluster="cpu:1", plan="single", level="O0"):
    """Losses, parameters, and how often each of the three operators is called by the first rank."""
    model = Scored(loss)
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 8, generator=generator), "labels": torch.randint(CLASSES, (8,), generator=generator)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = tutti.parallelize(model, optimizer, batch, cluster=cluster, plan=plan, level=level)
    losses = [step(batch).item() for _ in range(3)]
    operators = ops.linear_logsumexp, ops.linear_logsumexp_backward, ops.linear_logsumexp_with_gradients
    targets = [node.target for node in step.program.graph.nodes]
    return losses, step.state_dict(), [targets.count(operator.default) for operator in operators]


def same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-6)


def test_in_one_pass():
    ours, twice = trained(lambda loss: 0.5 * loss), trained(lambda loss: loss * loss / loss.detach() / 2)
    assert ours[2] == [0, 0, 1]
    assert twice[2] == [1, 1, 0], "its gradient depends on it"
    same(ours, twice)


@pytest.mark.parametrize(
    ("plan", "expected"), [("dp", [0, 0, 1]), ("tp", [1, 1, 0]), ("tpxsplits2", [2, 2, 0]), ("dpxsplits2", [0, 0, 2])]
)
def test_on_two_devices(plan, expected):
    """A split vocabulary needs numbers of all ranks between the passes."""
    outcome = trained(lambda loss: loss, "cpu:2", plan)
    assert outcome[2] == expected
    same(outcome, trained(lambda loss: loss))


@pytest.mark.parametrize("total", [lambda a, b: (a + b) / 2, lambda a, b: b + a * b.detach()])
def test_two_losses(total):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

        def forward(self, x, labels):
            return total(F.cross_entropy(self.first(x), labels), F.cross_entropy(self.second(x), labels))

    batch = {"x": torch.randn(6, 8), "labels": torch.randint(CLASSES, (6,))}
    ours, theirs = Two(), Two()
    step = tutti.parallelize(ours, torch.optim.SGD(ours.parameters(), lr=0.1), batch, cluster="cpu:1", plan="single",
                             level="O0")  # fmt: skip
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        loss = theirs(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step(batch).item() == pytest.approx(loss.item(), rel=1e-5)
