"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after the other, and those to come make up.

With H = X^T X + damping, and U the upper Cholesky factor of H^-1 (H^-1 = U^T U), column j is rounded to q, and the
columns after it change by -(w_j - q) / U_jj U_j,j+1:. That minimizes ||X (W - Q)^T||^2 over them for the columns
that are fixed. Columns are taken in blocks, so that most changes are one product of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.scheme import Parts, Scheme

BLOCK = 128  # columns between two products


def quantize(
    weight: Tensor, scheme: Scheme, gram: Tensor, damping: float = 0.01, order: bool = True, block: int = BLOCK
) -> Parts:
    """The quantized weight of (n, k).

    gram: sum of x x^T (k, k) over inputs. damping: added to its diagonal, as a share of the diagonal's mean; more is
    taken where the factor does not exist. order: columns of large diagonal come first, and groups keep the scales that
    they have in the original weight ("static groups"); otherwise a group's scales are those of what it has become
    when it is reached. Inputs that are always 0 are rounded to nearest and change nothing.
    """
    work, diagonal = weight.float().clone(), gram.diagonal().clone()
    k, group = weight.shape[1], scheme.group or weight.shape[1]
    dead = diagonal == 0
    if bool(dead.all()):
        return scheme.quantize(weight)
    diagonal[dead] = 1
    scales, zeros = scheme.grid(weight)
    turn = torch.argsort(diagonal, descending=True, stable=True) if order else torch.arange(k)
    turned = gram.float()[turn[:, None], turn]
    turned.diagonal().copy_(diagonal[turn])
    upper = factor(turned, damping * float(diagonal[~dead].mean()))
    del turned
    work, codes = work[:, turn], torch.zeros_like(work, dtype=torch.uint8)
    for begin in range(0, k, block):
        end = min(begin + block, k)
        errors = torch.zeros(len(work), end - begin)
        for j in range(begin, end):
            of = int(turn[j]) // group
            if not order and scheme.group and j % group == 0:
                ahead = work[:, j : j + group].clone()
                if j > begin:  # what the block's own columns will change is known; the rest of the group is behind them
                    last = min(j + group, k)
                    if last > end:
                        ahead[:, end - j :] -= errors[:, : j - begin] @ upper[begin:j, end:last]
                new_scales, new_zeros = scheme.grid(ahead.to(weight.dtype))
                scales[:, of] = new_scales[:, 0]
                if zeros is not None and new_zeros is not None:
                    zeros[:, of] = new_zeros[:, 0]
            column = work[:, j : j + 1]
            own = (scales[:, of : of + 1], None if zeros is None else zeros[:, of : of + 1])
            codes[:, j] = scheme.codes(column, *own)[:, 0]
            rounded = scheme.dequantize(Parts(codes[:, j : j + 1], *own))
            error = (column - rounded)[:, 0] / upper[j, j]
            work[:, j:end] -= error.unsqueeze(1) * upper[j, j:end]
            errors[:, j - begin] = error
        work[:, end:] -= errors @ upper[begin:end, end:]
    made = torch.empty_like(codes)
    made[:, turn] = codes
    return Parts(made, scales, zeros)


def factor(gram: Tensor, damping: float) -> Tensor:
    """U (k, k) with U^T U = (gram + damping)^-1, upper triangular. damping grows until it exists."""
    for _ in range(8):
        damped = gram.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed) and bool(upper.isfinite().all()):
                return upper
        damping *= 10
    raise ValueError("the calibration data gives a matrix that is not positive; are there infinite activations?")
