"""Connectionist temporal classification (Graves et al. 2006) with lengths in tensors.

torch's operator sizes its table of path probabilities by the longest target, which depends on values. This one sizes it
by the shape of `targets`, so that all shapes are known from the operands' shapes.

| operand | shape | |
|---|---|---|
| log_probs | (T, N, C) | |
| targets | (N, S), or (S,) of all one behind another | int32 or int64 |
| input_lengths, target_lengths | (N,) | int32 or int64 |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tutti.nn.once import differentiable_once

aten = torch.ops.aten
_operands = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(f"ctc_loss({_operands}, int blank, bool zero_infinity) -> (Tensor, Tensor)")
_library.define(
    f"ctc_loss_backward(Tensor grad, {_operands}, Tensor loss, Tensor alpha, int blank, bool zero_infinity) -> Tensor"
)


def room(targets: Tensor) -> int:
    """States of the longest path through a target: its labels and the blanks around them."""
    return 2 * targets.shape[-1] + 1


def forward(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity):
    """(loss of each sequence, log probabilities of paths (N, T, states), -inf where no path is)"""
    _check(log_probs, targets, input_lengths, target_lengths)
    loss, alpha = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    time, states = (torch.arange(n, device=alpha.device) for n in alpha.shape[1:])
    reachable = (time < input_lengths.unsqueeze(1)).unsqueeze(2) & (
        states <= 2 * target_lengths.unsqueeze(1)
    ).unsqueeze(1)
    alpha = torch.where(reachable, alpha, -torch.inf)  # torch leaves the rest uninitialized
    return loss, F.pad(alpha, (0, room(targets) - alpha.shape[-1]), value=-torch.inf)


def backward(grad, log_probs, targets, input_lengths, target_lengths, loss, alpha, blank, zero_infinity):
    _check(log_probs, targets, input_lengths, target_lengths)
    if alpha.shape != (log_probs.shape[1], log_probs.shape[0], room(targets)):
        raise ValueError(f"ctc_loss: paths of shape {tuple(alpha.shape)} for {tuple(log_probs.shape)}")
    longest = int(target_lengths.max()) if target_lengths.numel() else 0
    states = alpha[..., : 2 * longest + 1].contiguous()
    operands = log_probs, targets, input_lengths, target_lengths, loss, states
    return aten._ctc_loss_backward.Tensor(grad, *operands, blank, zero_infinity).contiguous()


def _check(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> None:
    """Raise IndexError for lengths and labels out of range: torch's CPU kernels would write out of bounds."""
    if targets.device.type != "cpu" or not target_lengths.numel():
        return
    time, _, classes = log_probs.shape
    if targets.ndim == 1:
        used, most = targets, int(target_lengths.sum())
    else:
        used, most = targets[torch.arange(targets.shape[1]) < target_lengths.unsqueeze(1)], int(target_lengths.max())
    if int(input_lengths.max()) > time or most > targets.shape[-1]:
        raise IndexError(f"ctc_loss: lengths beyond {time} steps or {targets.shape[-1]} labels")
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < classes:
        raise IndexError(
            f"ctc_loss: labels are from {int(used.min())} to {int(used.max())}, but must be from 0 to {classes - 1}"
        )


def _fake(log_probs, targets, *rest):
    time, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, room(targets))


for _device in ("CPU", "CUDA"):
    _library.impl("ctc_loss", forward, _device)
    _library.impl("ctc_loss_backward", backward, _device)
torch.library.register_fake("tutti::ctc_loss", _fake)
torch.library.register_fake("tutti::ctc_loss_backward", lambda grad, x, *rest: x.new_empty(x.shape))
differentiable_once("ctc_loss", "ctc_loss_backward")
