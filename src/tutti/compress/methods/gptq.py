"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after the other, and those to come make up.

With H = X^T X + damping, and U the upper Cholesky factor of H^-1 (H^-1 = U^T U), column j is rounded to q, and the
columns after it change by -(w_j - q) / U_jj U_j,j+1:. That minimizes ||X (W - Q)^T||^2 over them for the columns
that are fixed. Columns are taken in blocks, so that most changes are one product of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.quantized.scheme import Parts, Scheme, nonzero

BLOCK = 128  # columns between two products


def quantize(
    weight: Tensor, scheme: Scheme, gram: Tensor, damping: float = 0.01, order: bool = True, block: int = BLOCK
) -> Parts:
    """The quantized weight of (n, k).

    gram: sum of x x^T (k, k) over inputs. damping: added to its diagonal, as a share of the diagonal's mean; more is
    taken where the factor does not exist. order: columns of large diagonal come first, and groups keep the scales that
    they have in the original weight ("static groups"); otherwise a group's scales are those of what it has become
    when it is reached. Inputs that are always 0 are rounded to nearest and change nothing. Weights of 0, as those that
    were pruned, stay 0.
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
    absent = (weight == 0)[:, turn].T.contiguous()
    work, codes = work[:, turn], torch.zeros(weight.shape, dtype=torch.uint8)
    middle = torch.full((len(work),), 2.0 ** (scheme.bits - 1))
    for begin in range(0, k, block):
        end = min(begin + block, k)
        columns = work[:, begin:end].T.contiguous()
        errors, rounded = torch.zeros_like(columns), torch.zeros_like(columns)
        for j in range(begin, end):
            of, at = int(turn[j]) // group, j - begin
            if not order and scheme.group and j % group == 0:
                last = min(j + group, k)
                ahead = torch.cat([columns[at : last - begin].T, work[:, end:last]], 1)
                if last > end:  # what this block's columns will change behind it
                    ahead[:, end - j :] -= errors[:at].T @ upper[begin:j, end:last]
                fresh, fresh_zeros = scheme.grid(ahead.to(weight.dtype))
                scales[:, of] = fresh[:, 0]
                if zeros is not None and fresh_zeros is not None:
                    zeros[:, of] = fresh_zeros[:, 0]
            scale, zero = nonzero(scales[:, of]), middle if zeros is None else zeros[:, of].float()
            rounded[at] = scheme.nearest((columns[at] / scale).masked_fill_(absent[j], 0.0) + zero)
            errors[at] = (columns[at] - scales[:, of] * (rounded[at] - zero)) / upper[j, j]
            columns[at + 1 :].addr_(upper[j, j + 1 : end], errors[at], alpha=-1)
        codes[:, begin:end] = rounded.T.to(torch.uint8)
        work[:, end:].addmm_(errors.T, upper[begin:end, end:], alpha=-1)
    ordered = torch.empty_like(codes)
    ordered[:, turn] = codes
    return Parts(ordered, scales, zeros)


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
