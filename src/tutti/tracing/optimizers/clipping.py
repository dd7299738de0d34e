"""The norm of all gradients: clipping by it, and whether it is finite."""

import torch
from torch import Tensor

from tutti.tracing.optimizers.precision import LOW_PRECISION, wide


def global_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, a 0-d tensor of at least float32."""
    return torch.cat([_squared(grad).reshape(1) for grad in grads]).sum().sqrt()


def _squared(grad: Tensor) -> Tensor:
    if grad.is_complex():
        return torch.view_as_real(grad).square().sum()
    if grad.dtype in LOW_PRECISION:  # compiled, one pass with the cast
        return wide(grad).square().sum()
    flat = grad.reshape(-1)
    return torch.dot(flat, flat)


def not_finite(norm: Tensor) -> Tensor:
    """1 where a norm is infinite or NaN, else 0: a 0-d float32 tensor."""
    return torch.isfinite(norm).logical_not().to(torch.float32)


def poisoned(grads: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """Make the smallest gradient NaN if the loss is not finite, so that checks of gradients also detect such losses.

    loss - loss, which is 0 or NaN, is added to it. This works for all microbatches, on any devices.
    """
    last = min(reversed(grads), key=lambda name: grads[name].numel())
    return {**grads, last: grads[last] + (loss - loss)}


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of ``torch.nn.utils.clip_grad_norm_`` (2-norm), min(1, max_norm / (norm + 1e-6)).

    It is a 0-d tensor of the dtype of the norm.

    Sums run in float32 for bfloat16 gradients too (`global_norm`), where torch rounds the norm to bfloat16.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_norm is {max_norm}; it must be positive (leave clipping off with None)")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
