"""as_strided reads the same numbers whatever strides an operand has on a device."""

import pytest
import torch

import tutti

aten = torch.ops.aten


class Windows(torch.nn.Module):
    """Overlapping windows of a sequence that is the first dim of its memory, as Longformer cuts them."""

    def __init__(self, begin: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.begin = torch.nn.Linear(6, 6), begin

    def forward(self, x):
        y = self.linear(x.transpose(0, 1)).transpose(0, 1)  # (batch, length, width), the length outermost
        batch, length, width = y.shape
        step = 2 * y.stride(1)
        windows = y.as_strided(
            (batch, length // 2 - 1, 4, width),
            (y.stride(0), step, y.stride(1), 1),
            *[self.begin] * (self.begin is not None),
        )
        return windows[:, :, 1:].square().mean()


@pytest.mark.filterwarnings("ignore:no rule says how to split aten.as_strided")
@pytest.mark.parametrize(("plan", "devices"), [("single", 1), ("dp", 2), ("tp", 2), ("zero3", 3)])
def test_windows_of_a_transposed_tensor(plan, devices):
    x = torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(0))
    model, reference = Windows(), Windows()
    reference(x).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tutti.parallelize(model, optimizer, (x,), cluster=f"cpu:{devices}", plan=plan, level="O0")
    torch.testing.assert_close(step.gradients((x,)), {n: p.grad for n, p in reference.named_parameters()})


def test_operands_have_the_order_of_their_memory():
    graph = tutti.capture(Windows(), (torch.randn(6, 8, 6),), gradients=False)
    (node,) = [n for n in graph.calls if n.target is aten.as_strided.default]
    assert node.args[0].meta["val"].shape == (8, 6, 6) and node.args[2] == [6, 72, 36, 1]


def test_memory_outside_of_the_tensor_is_refused():
    with pytest.raises(ValueError, match="reads memory outside the tensor: call it on the base tensor"):
        tutti.capture(Windows(begin=72), (torch.randn(6, 8, 6),), gradients=False)
