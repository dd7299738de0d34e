"""Functions of torch that capture replaces, because their code reads values or CPU features.

    with substituted(model):
        ...  # trace the model

`tracing.rewrite.replace_operators` replaces operators. This replaces functions that decide before any operator is
called:

| function | what torch does | here |
|---|---|---|
| F.scaled_dot_product_attention | decomposes on a CPU where keys and values differ in width | pads the narrower |
| F.ctc_loss | reads lengths that are tuples into a tensor's memory | makes tensors of them |
| torch.tensor | reads the memory of tensors in a list | stacks them |
| pack_padded_sequence, pad_packed_sequence | read lengths out of memory | select rows by the lengths' values |
| torch.cov, torch.corrcoef | check a count that is known from shapes, as a tensor | compute from shapes |
| BatchNorm with momentum=None | takes the average's weight out of a tensor | keeps it one |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tutti import compat

_attention = F.scaled_dot_product_attention


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """One fused operator even if keys and values differ in width, as in multi-head latent attention (DeepSeek-V2).

    Zero padding of the values gives zeros in the result, which are cut off. Zero padding of queries and keys changes no
    score.
    """
    keys, values = key.shape[-1], value.shape[-1]
    if query.device.type != "cpu" or keys == values:
        return _attention(query, key, value, *args, **options)
    if values < keys:
        return _attention(query, key, F.pad(value, (0, keys - values)), *args, **options)[..., :values]
    if len(args) < 4 and options.get("scale") is None:
        options["scale"] = 1 / math.sqrt(keys)
    query, key = (F.pad(x, (0, values - keys)) for x in (query, key))
    return _attention(query, key, value, *args, **options)


def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *args: Any, **options: Any):
    """Lengths become constants of the step."""
    of_inputs, of_targets = (
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device=log_probs.device)
        for x in (input_lengths, target_lengths)
    )
    return F.ctc_loss(log_probs, targets, of_inputs, of_targets, *args, **options)


_cov = torch.cov


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None):
    if fweights is not None or aweights is not None:
        return _cov(input, correction=correction, fweights=fweights, aweights=aweights)
    x = input if input.ndim == 2 else input.reshape(1, -1)
    x = x - x.mean(1, keepdim=True)
    return (x @ x.mT.conj() / max(0, x.shape[1] - correction)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    c = cov(input)
    if c.ndim == 0:
        return c / c
    deviation = c.diagonal().sqrt()
    return (c / deviation.unsqueeze(1) / deviation).clamp(-1, 1)


_tensor = torch.tensor


def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
    """Replace torch.tensor, which reads the memory of tensors in a list; fake tensors have none."""
    if not isinstance(data, (list, tuple)) or not any(isinstance(x, Tensor) for x in pytree.tree_leaves(data)):
        return _tensor(data, dtype=dtype, device=device, **options)
    stacked = _stacked(data)
    if dtype is None and stacked.is_floating_point():
        dtype = torch.get_default_dtype()
    return stacked.detach().to(device=device or "cpu", dtype=dtype).clone()


def _stacked(data: Any) -> Tensor:
    if isinstance(data, Tensor):
        return data
    return torch.stack([_stacked(x) for x in data]) if isinstance(data, (list, tuple)) else _tensor(data)


def pack_padded(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the steps of sorted sequences by time, and the number of sequences at each time, a constant."""
    values = lengths.tolist()
    if any(a < b for a, b in itertools.pairwise(values)):
        raise RuntimeError("pack_padded_sequence: lengths must be in decreasing order, or pass enforce_sorted=False")
    x = input if batch_first else input.transpose(0, 1)
    sizes = [sum(length > t for length in values) for t in range(values[0])]
    rows = [b * x.shape[1] + t for t, size in enumerate(sizes) for b in range(size)]
    with compat.computing_really():  # recurrent operators read its memory
        batch_sizes = _tensor(sizes)
    return x.flatten(0, 1).index_select(0, _tensor(rows, device=input.device)), batch_sizes


def pad_packed(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int):
    """Pad the sequences of `pack_padded` to a length. Returns them and their lengths."""
    with compat.computing_really():
        sizes = batch_sizes.tolist()
        lengths = _tensor([sum(size > b for size in sizes) for b in range(sizes[0])])
    steps = max(total_length, len(sizes))
    starts = [0, *itertools.accumulate(sizes)]
    padding = len(data)  # the row behind the last one
    rows = [starts[t] + b if t < len(sizes) and b < sizes[t] else padding
            for b in range(sizes[0]) for t in range(steps)]  # fmt: skip
    padded = torch.cat([data, data.new_full((1, *data.shape[1:]), padding_value)])
    sequences = padded.index_select(0, _tensor(rows, device=data.device)).unflatten(0, (sizes[0], steps))
    return sequences if batch_first else sequences.transpose(0, 1), lengths


INSTEAD: dict[Any, Callable[..., Any]] = {
    compat.of_packed_sequences("_pack_padded_sequence"): pack_padded,
    compat.of_packed_sequences("_pad_packed_sequence"): pad_packed,
    F.scaled_dot_product_attention: attention,
    F.ctc_loss: ctc_loss,
    torch.cov: cov,
    torch.corrcoef: corrcoef,
    torch.tensor: tensor,
}


class _Substituted(TorchFunctionMode):
    """Its presence also keeps nn.TransformerEncoder and nn.MultiheadAttention from using their inference
    kernels."""

    hooked = False  # whether a hook was registered on a tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.hooked = self.hooked or func is Tensor.register_hook
        chosen: Any = INSTEAD.get(func, func)
        return chosen(*args, **(kwargs or {}))


def _cumulative(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Batch norm in training whose running statistics are the mean of all batches."""
    norm._check_input_dim(x)
    assert norm.num_batches_tracked is not None and norm.running_mean is not None and norm.running_var is not None
    norm.num_batches_tracked.add_(1)
    share = 1 / norm.num_batches_tracked.to(norm.running_mean.dtype)
    mean, var = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    y = F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    with torch.no_grad():
        norm.running_mean.copy_((1 - share) * norm.running_mean + share * mean)
        norm.running_var.copy_((1 - share) * norm.running_var + share * var)
    return y


@contextmanager
def substituted(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Replace the functions above in this thread, also in modules of the model, within the block. Yields a function
    that tells whether a hook was registered on a tensor."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.momentum is None and m.training
             and m.running_mean is not None and "forward" not in vars(m)]  # fmt: skip
    for norm in norms:
        vars(norm)["forward"] = partial(_cumulative, norm)
    try:
        with _Substituted() as mode:
            yield lambda: mode.hooked
    finally:
        for norm in norms:
            del norm.forward
