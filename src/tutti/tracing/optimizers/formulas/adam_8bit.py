"""Adam and AdamW whose moments take one byte per element.

The update is that of Adam in float32, between decoding and encoding the moments. A row (the last dim) of a tensor is
cut into blocks; each block has a scale s, its largest absolute value, and each element x of it a whole number q:

    first moment:   q = round(127 sign(x) sqrt(|x| / s)),   x = s sign(q) (q / 127)^2        (int8)
    second moment:  q = round(255 (x / s)^(1/4)),           x = s (q / 255)^4                (uint8)

The powers give small elements of a block smaller steps: the smallest second moment other than 0 is 2.4e-10 of the
largest. A block has at most `block_size` elements: it is the longest equal part of a row that does not exceed that. A
row without a part of 32 to `block_size` elements is one block. Parameters with fewer than `smallest` elements keep
float32 moments.

Dettmers et al., "8-bit optimizers via block-wise quantization" (2022), who encode with a table of dynamic exponents
instead of a power, so that results differ from bitsandbytes by the rounding of the moments.
"""

import torch
from torch import Tensor

from tutti.tracing.optimizers.formulas.adam import adam
from tutti.tracing.optimizers.precision import wide_dtype
from tutti.tracing.optimizers.table import Group, State, register_named

SHORTEST = 32  # elements of a block


def block_of(row: int, block_size: int) -> int:
    """Number of elements of a block in a row of so many elements."""
    parts = [n for n in range(min(block_size, row), SHORTEST - 1, -1) if row % n == 0]
    return parts[0] if parts else row


def is_quantized(group: Group, param: Tensor) -> bool:
    return param.ndim > 0 and param.numel() >= group["smallest"]


def _state(group: Group, param: Tensor) -> State:
    if not is_quantized(group, param):
        return {key: torch.zeros_like(param, dtype=wide_dtype(param)) for key in ("exp_avg", "exp_avg_sq")}
    blocks = (*param.shape[:-1], param.shape[-1] // block_of(param.shape[-1], group["block_size"]))
    return {
        "exp_avg": torch.zeros_like(param, dtype=torch.int8),
        "exp_avg_scale": param.new_zeros(blocks, dtype=torch.float32),
        "exp_avg_sq": torch.zeros_like(param, dtype=torch.uint8),
        "exp_avg_sq_scale": param.new_zeros(blocks, dtype=torch.float32),
    }


@register_named(
    "tutti.Adam8bit",
    "tutti.AdamW8bit",
    state=_state,
    options=("betas", "eps", "weight_decay", "decoupled_weight_decay", "block_size", "smallest", "maximize"),
)
def adam_8bit(
    group: Group, param: Tensor, grad: Tensor, state: State, step: Tensor, lr: Tensor
) -> tuple[Tensor, State]:
    options = {**group, "amsgrad": False}
    if not is_quantized(group, param):
        return adam(options, param, grad, state, step, lr, None, None)
    moments = {
        "exp_avg": decoded(state["exp_avg"], state["exp_avg_scale"], param.dtype),
        "exp_avg_sq": decoded(state["exp_avg_sq"], state["exp_avg_sq_scale"], param.dtype),
    }
    new, moments = adam(options, param, grad, moments, step, lr, None, None)
    block = block_of(param.shape[-1], group["block_size"])
    first, first_scale = encoded_signed(moments["exp_avg"], block)
    second, second_scale = encoded_positive(moments["exp_avg_sq"], block)
    return new, {"exp_avg": first, "exp_avg_scale": first_scale,
                 "exp_avg_sq": second, "exp_avg_sq_scale": second_scale}  # fmt: skip


def decoded(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes (int8 or uint8, of any shape) with the scales of their blocks."""
    parts = code.unflatten(-1, (scale.shape[-1], -1)).to(dtype)
    if code.dtype is torch.int8:
        y = parts / 127
        y = y * y.abs()
    else:
        y = (parts / 255).square().square()
    return (y * scale.to(dtype).unsqueeze(-1)).flatten(-2)


def encoded_signed(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """int8 codes of any values, and the float32 scales of their blocks."""
    parts, scale = _blocks(x, block)
    return (parts.sign() * (parts.abs().sqrt() * 127).round()).to(torch.int8).flatten(-2), scale


def encoded_positive(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """uint8 codes of values that are not negative, and the float32 scales of their blocks."""
    parts, scale = _blocks(x, block)
    return (parts.sqrt().sqrt() * 255).round().to(torch.uint8).flatten(-2), scale


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The blocks, divided by their scales, and the scales."""
    parts = x.to(torch.float32).unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1)
    return parts / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1), scale
