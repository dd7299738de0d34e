"""What a replay finds out: which memory is new, which is looked at, and the sizes that nobody wrote down."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from programs import program
from tutti.analysis.replay import Operand, Storage, _sliced, form, replay

aten, ops = torch.ops.aten, torch.ops.tutti


def test_a_reshape_copies_only_where_it_has_to():
    def build(calls, x):
        turned = calls(aten.permute.default, (x, [1, 0]), (3, 2))
        flat = calls(aten.reshape.default, (turned, [6]), (6,))
        return (flat, calls(aten.reshape.default, (x, [6]), (6,)))

    turned, copied, viewed = replay(program(build, {"batch:x": (2, 3)}, {})).events
    assert not turned.computes and not viewed.computes
    assert copied.computes and [s.bytes for s in copied.allocated] == [24]
    assert not copied.reads[0].contiguous and viewed.reads[0].contiguous


@pytest.mark.parametrize("arguments", [(0, 2, 5), (1,), (0, 1, None), (-1, -3, 2**63 - 1), (1, 6, 4), (0, 1, 99, 3)])
def test_a_slice_lies_where_torch_puts_it(arguments):
    x = torch.empty(7, 6).t()
    storage = Storage(x.nbytes, fx.Graph().placeholder("x"))
    part = _sliced(Operand(form(tuple(x.shape), x.stride(), x.dtype), storage, 3), *arguments)
    expected = torch.ops.aten.slice.Tensor(x, *arguments)
    assert (part.form.shape, part.form.stride) == (expected.shape, expected.stride())
    assert part.offset - 3 == expected.storage_offset() and part.storage is storage


def test_an_expanded_operand_is_read_once():
    def build(calls, x):
        wide = calls(aten.expand.default, (x, [8, 3]), (8, 3))
        return (calls(aten.neg.default, (wide,), (8, 3)),)

    *_, negated = replay(program(build, {"batch:x": (1, 3)}, {})).events
    assert negated.reads[0].spec.bytes == 96 and negated.reads[0].bytes == 12


@pytest.mark.parametrize("loss", [aten.mse_loss.default, aten.smooth_l1_loss.default])
def test_losses_whose_kernel_makes_room_for_all_elements(loss):
    def build(calls, x, y):
        return (calls(loss, (x, y), ()),)

    (event,) = replay(program(build, {"batch:x": (4, 5), "batch:y": (4, 5)}, {})).events
    real = loss(torch.zeros(4, 5), torch.zeros(4, 5))
    assert event.allocated[0].bytes == real.untyped_storage().nbytes() == 80
    assert event.outputs[0].shape == ()


@pytest.mark.parametrize(("time", "batch", "width"), [(8, 4, 16), (16, 12, 24), (16, 8, 32), (12, 6, 48)])
def test_the_workspace_of_an_lstm(time, batch, width):
    shapes = [(time, batch, 24), (4 * width, 24), (4 * width, width), (4 * width,), (4 * width,), *[(batch, width)] * 2]
    options = (False, [], 2, width, 1, True, False, False)

    def build(calls, *tensors):
        return (calls(ops.lstm_layer_training.default, (*tensors, *options), ()),)

    (event,) = replay(program(build, {f"param:{i}": shape for i, shape in enumerate(shapes)}, {})).events
    real = ops.lstm_layer_training(*(torch.zeros(shape) for shape in shapes), *options)
    assert [s.bytes for s in event.allocated[:3]] == [x.nbytes for x in real[:3]]
    assert event.allocated[3].bytes == pytest.approx(real[3].nbytes, rel=0.06)
