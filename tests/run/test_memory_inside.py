"""What operators allocate for themselves, against what torch's allocator sees."""

from __future__ import annotations

import pytest
import torch

from programs import program
from tutti.run.memory_inside import INSIDE
from tutti.run.simulated.replay import replay
from tutti.train.memory import PeakMemory, live_bytes

aten = torch.ops.aten


def allocated(function) -> int:
    """Bytes that a call needs beyond what it returns."""
    found: list[int] = []
    peak, made, before = PeakMemory(found.append), (), 0
    for _ in range(4):
        del made
        before = live_bytes()
        made = peak(function)
    return found[0] - before - sum(x.nbytes for x in made)


@pytest.mark.parametrize(
    ("batch", "channels", "made", "size"), [(12, 24, 3, 48), (12, 24, 24, 48), (12, 64, 64, 32), (12, 24, 96, 24)]
)
@pytest.mark.parametrize("wanted", [True, False])
def test_the_gradient_of_a_convolution(batch, channels, made, size, wanted):
    shapes = {"grad:y": (batch, made, size, size), "batch:x": (batch, channels, size, size),
              "param:w": (made, channels, 3, 3)}  # fmt: skip
    options = ([made], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [wanted, True, True])

    def build(calls, *tensors):
        return (calls(aten.convolution_backward.default, (*tensors, *options), ()),)

    (event,) = replay(program(build, shapes, {})).events
    tensors = [torch.ones(shape) for shape in shapes.values()]
    real = allocated(lambda: [x for x in aten.convolution_backward(*tensors, *options) if x is not None])
    predicted = INSIDE[aten.convolution_backward.default](event)
    if wanted:
        assert predicted == pytest.approx(real, rel=0.06)
    else:
        assert predicted == 0
