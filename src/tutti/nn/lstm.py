"""LSTM layers on a CPU as functions of their inputs only.

torch's fused layer (oneDNN) passes an opaque workspace to the backward pass, and only while gradients are enabled.
These operators omit it: `lstm_layer_backward` recomputes the forward pass. If both passes run on the same tensors,
`lstm_layer_training` and `lstm_layer_backward_kept` pass the workspace on (see `tutti.lower.memory.workspace`).

Arguments are those of `aten.mkldnn_rnn_layer` without `train`: input (time, batch, features), four weights, state and
cell (batch, hidden), then options.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
OPTIONS = ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first")

_tensors = "Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, Tensor c"
_gradients = "Tensor? g_out, Tensor? g_h, Tensor? g_c"
_options = (
    "bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional, "
    "bool batch_first"
)
_seven = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(f"lstm_layer({_tensors}, {_options}) -> (Tensor, Tensor, Tensor)")
_library.define(f"lstm_layer_training({_tensors}, {_options}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"lstm_layer_backward({_tensors}, {_gradients}, {_options}) -> {_seven}")
_library.define(
    f"lstm_layer_backward_kept({_tensors}, {_gradients}, {_options}, Tensor out, Tensor h_out, Tensor c_out, "
    f"Tensor workspace) -> {_seven}"
)


def _layer(*args):
    return aten.mkldnn_rnn_layer(*args, False)[:3]


def _training(*args):
    with torch.enable_grad():  # else there is no workspace
        return aten.mkldnn_rnn_layer(*(a.detach() if isinstance(a, Tensor) else a for a in args), True)


def _backward(*args):
    return _backward_kept(*args, *_training(*args[:7], *args[10:]))


def _backward_kept(*args):
    tensors, gradients, options, (out, h_out, c_out, workspace) = args[:7], args[7:10], args[10:18], args[18:]
    options_of_call = dict(zip(OPTIONS, options, strict=True))
    sizes, first = options_of_call.pop("batch_sizes"), options_of_call.pop("batch_first")
    bidirectional = options_of_call.pop("bidirectional")
    return aten.mkldnn_rnn_layer_backward(
        *tensors, out, h_out, c_out, *gradients, *options_of_call.values(), True, bidirectional, sizes, first, workspace
    )


def _fake_layer(x, w_ih, w_hh, b_ih, b_hh, h, c, *options):
    return x.new_empty((*x.shape[:2], h.shape[-1])), torch.empty_like(h), torch.empty_like(c)


def _fake_backward(*args):
    x, w_ih, w_hh, _, _, h, c = args[:7]
    bias = (w_ih.shape[0],)
    return tuple(x.new_empty(shape) for shape in (x.shape, w_ih.shape, w_hh.shape, bias, bias, h.shape, c.shape))


_library.impl("lstm_layer", _layer, "CPU")
_library.impl("lstm_layer_training", _training, "CPU")
_library.impl("lstm_layer_backward", _backward, "CPU")
_library.impl("lstm_layer_backward_kept", _backward_kept, "CPU")
torch.library.register_fake("tutti::lstm_layer", _fake_layer)
torch.library.register_fake("tutti::lstm_layer_backward", _fake_backward)
