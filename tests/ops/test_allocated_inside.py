"""What operators allocate for themselves, against what torch's allocator sees."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import fx

from cases import crossed
from programs import program
from tutti.analysis.replay import Event, Operand, Storage, dense_form, replay
from tutti.ir.op_info import WORKSPACE
from tutti.ir.spec import Spec
from tutti.nn.loss.linear_cross_entropy import BLOCK, _blocks
from tutti.train.text.memory import PeakMemory, live_bytes

aten, ops = torch.ops.aten, torch.ops.tutti


def event_of(call, operands, *args) -> Event:
    """A call of dense operands, as a replay has it."""
    node = fx.Graph().call_function(call, args)
    specs = [Spec(tuple(x.shape), x.dtype) for x in operands if isinstance(x, torch.Tensor)]
    return Event([node], [Operand(dense_form(spec), Storage(spec.bytes, node)) for spec in specs], [], {}, [], 0, [])


def allocated(function) -> int:
    """Bytes that a call needs beyond what it returns."""
    peaks: list[int] = []
    peak, outputs, before = PeakMemory(peaks.append), (), 0
    for call in range(1, 5):
        del outputs
        if call == 4:
            before = live_bytes()
        outputs = peak(function)
    return peaks[0] - before - sum(x.nbytes for x in outputs)


@pytest.mark.parametrize(
    ("batch", "channels", "out_channels", "size"),
    [(12, 24, 3, 48), (12, 24, 24, 48), (12, 64, 64, 32), (12, 24, 96, 24)],
)
@pytest.mark.parametrize("wanted", [True, False])
def test_the_gradient_of_a_convolution(batch, channels, out_channels, size, wanted):
    shapes = {"grad:y": (batch, out_channels, size, size), "batch:x": (batch, channels, size, size),
              "param:w": (out_channels, channels, 3, 3)}  # fmt: skip
    options = ([out_channels], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [wanted, True, True])

    def build(calls, *tensors):
        return (calls(aten.convolution_backward.default, (*tensors, *options), ()),)

    (event,) = replay(program(build, shapes, {})).events
    tensors = [torch.ones(shape) for shape in shapes.values()]
    real = allocated(lambda: [x for x in aten.convolution_backward(*tensors, *options) if x is not None])
    predicted = WORKSPACE[aten.convolution_backward.default](event)
    if wanted:
        assert predicted == pytest.approx(real, rel=0.06)
    else:
        assert predicted == 0


@cache
def scratch(rows: int, width: int, classes: int, dtype: torch.dtype) -> int:
    """Bytes that a product of a block takes besides its result, which is the processor's affair."""
    hidden, weight, logits = (
        torch.ones(*shape, dtype=dtype) for shape in [(rows, width), (classes, width), (rows, classes)]
    )
    products = (lambda: hidden @ weight.t()), (lambda: logits @ weight), (lambda: logits.t() @ hidden)
    return max(allocated(lambda product=product: [product()]) for product in products)


PARTS = [
    ("", []), ("_backward", [True, True]), ("_backward", [True, False]), ("_backward", [False, True]),
    ("_with_gradients", [True, True]), ("_with_gradients", [True, False]), ("_with_gradients", [False, True]),
]  # fmt: skip
SIZES = [(512, 64, 1024), (512, 256, 4096), (512, 64, 16384)]  # rows, width, classes
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("part, wanted, rows, width, classes, dtype", crossed(PARTS, SIZES, DTYPES))
def test_a_loss_whose_logits_come_in_blocks(part, wanted, rows, width, classes, dtype, monkeypatch):
    monkeypatch.setitem(BLOCK, "cpu", 4 << 20)
    generator, wanted = torch.Generator().manual_seed(0), [*wanted, False]
    x, w = (torch.randn(n, width, generator=generator).mul(0.2).to(dtype) for n in (rows, classes))
    labels, ones = torch.randint(classes, (rows,), generator=generator), torch.ones(rows)
    operands = {
        "": (x, w, None, labels),
        "_backward": (ones, ones, x, w, None, labels, ops.linear_logsumexp(x, w, None, labels)[0], wanted),
        "_with_gradients": (ones, ones, x, w, None, labels, wanted),
    }[part]
    call = getattr(ops, f"linear_logsumexp{part}").default
    real = allocated(lambda: [x for x in call(*operands) if x is not None])
    predicted, by_rows = WORKSPACE[call](event_of(call, operands, wanted)), part == "_with_gradients"
    block = next(_blocks(rows, w) if by_rows else _blocks(classes, x)).stop
    extra = scratch(block, width, classes, dtype) if by_rows else scratch(rows, width, block, dtype)
    assert 0.95 * real - extra <= predicted <= 1.05 * real


@pytest.mark.parametrize(("time", "batch", "features", "hidden"), [(8, 4, 64, 64), (2, 2, 256, 96)])
@pytest.mark.parametrize(("call", "error"), [
    (ops.lstm_layer.default, 0.06), (ops.lstm_layer_training.default, 0.06), (ops.lstm_layer_backward.default, 0.25),
])  # fmt: skip
def test_a_layer_of_an_lstm(call, error, time, batch, features, hidden):
    """Copies of the weights, gates and states of each step, and the workspace of oneDNN."""
    weights = [(4 * hidden, features), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    operands = [torch.ones(shape) for shape in ((time, batch, features), *weights, (batch, hidden), (batch, hidden))]
    if call is ops.lstm_layer_backward.default:
        operands += [torch.ones(time, batch, hidden), None, None]
    options = (False, [], 2, hidden, 1, True, False, False)
    real = allocated(lambda: [x for x in call(*operands, *options) if x is not None])
    assert WORKSPACE[call](event_of(call, operands)) == pytest.approx(real, rel=error)
