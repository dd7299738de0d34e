"""Fused attention on a GPU, all of torch's kernels: split over batch and heads.

The kernels differ in what else they pass to the backward pass (lengths, random state, padding of the log-sum-exp). That
is never split, and is equal on all ranks if there is no dropout inside.
"""

from __future__ import annotations

from string import ascii_lowercase

import torch
from torch import fx

from tutti.ir.op_info import BY_TOKEN, CONTIGUOUS, DENSE, FLOPS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import Call
from tutti.ops.attention.attention import attention_flops
from tutti.ops.registry import rules, specs

aten = torch.ops.aten
QUERY, KEY, VALUE, OUT = "b (g r) s! d!", "b g t! d!", "b g t! e!", "b (g r) s! e!"
LINES = {"query": QUERY, "key": KEY, "value": VALUE, "out": OUT, "grad_out": OUT, "grad_out_": OUT}


def _operand(name: str, spec: Spec, number: int) -> str:
    """The dims of an argument of this name."""
    if name in LINES:
        return LINES[name]
    if name == "logsumexp":  # of each query, sometimes padded, sometimes with a last dim of one
        return " ".join(["b", "(g r)", "l!", *["1"] * (len(spec.shape) - 3)])
    if name == "attn_bias":
        names = ["b", "(g r)", "s!", "t!"][4 - len(spec.shape) :]
        return " ".join("1" if n == 1 else c for c, n in zip(names, spec.shape, strict=True))
    return " ".join(f"{c}{number}!" if n > 1 else "1" for c, n in zip(ascii_lowercase, spec.shape, strict=False))


def _tensor_arguments(node: Call) -> dict[str, Call]:
    """The tensor arguments by name, in order."""
    named = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return {name: x for name, x in named.items() if isinstance(x, fx.Node)}


def _attention(first_outputs: tuple[str, ...]):
    """made: names of the first outputs; the others are whole."""

    def notation(node: Call):
        tensors, outputs = _tensor_arguments(node), specs(node)
        if len(first_outputs) == 3 and len(outputs) > 3 and outputs[3].numel:  # the gradient of a bias
            return None
        left = [_operand(name, x.meta["val"], i) for i, (name, x) in enumerate(tensors.items())]
        right = [_operand(name, spec, 0) for name, spec in zip(first_outputs, outputs, strict=False)]
        right += [f"={_operand('', spec, 90 + i)}" for i, spec in enumerate(outputs[len(first_outputs) :])]
        heads, groups = (tensors[name].meta["val"].shape[1] for name in ("query", "key"))
        linear = " | ~0" if len(first_outputs) == 3 else ""
        return f"{', '.join(left)} -> {', '.join(right)}{linear}", {"g": groups, "r": heads // groups}

    return notation


FORWARD = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
BACKWARD = [
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
]

# q, k, v and a bias; grad, q, k, v, then a bias or the output
DENSE |= dict.fromkeys(FORWARD, (0, 1, 2, 3)) | dict.fromkeys(BACKWARD, (0, 1, 2, 3, 4))
# Kernels overlook strides of the log-sum-exp, and one those of the output: its operands end with these and the state of
# a generator. `o_strideM` in torch's `mem_eff_attention/kernel_backward.h` is heads times width.
CONTIGUOUS |= dict.fromkeys(BACKWARD, (5,)) | {BACKWARD[1]: (-3,)}
BY_TOKEN[BACKWARD[1]] = (-4,)

rules(
    dict.fromkeys(FORWARD, _attention(("out", "logsumexp")))
    | dict.fromkeys(BACKWARD, _attention(("query", "key", "value")))
)


# the position of `is_causal` differs between the kernels
FLOPS |= {target: attention_flops(2, False, at) for target, at in zip(FORWARD, (4, 6, 6), strict=True)}
FLOPS |= {target: attention_flops(5, True, at) for target, at in zip(BACKWARD, (11, 11, 14), strict=True)}
