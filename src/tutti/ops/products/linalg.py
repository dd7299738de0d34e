"""Matrix decompositions and solvers: batches can be split, matrices cannot."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from tutti.ir.op_info import CONTIGUOUS
from tutti.ir.step_graph import Call
from tutti.ops.registry import operands, rules, specs

aten = torch.ops.aten

LINEAR = {
    aten.linalg_solve_triangular.default: " | ~1",
    aten.cholesky_solve.default: " | ~0",
    aten.linalg_lu_solve.default: " | ~2",
}  # in the right side


def _batches(node: Call) -> str | None:
    """Leading dims that all operands and results have."""
    tensors = [*(n.meta["val"] for n in operands(node)), *specs(node)]
    batch = tensors[0].shape[:-2]
    if any(t.shape[: len(batch)] != batch for t in tensors):
        return None
    lines = [
        " ".join([*ascii_lowercase[: len(batch)], *(f"m{i}_{d}!" for d in range(len(t.shape) - len(batch)))])
        for i, t in enumerate(tensors)
    ]
    inputs = len(operands(node))
    return f"{', '.join(lines[:inputs])} -> {', '.join(lines[inputs:])}{LINEAR.get(node.target, '')}"


rules(
    dict.fromkeys(
        [
            aten.linalg_cholesky_ex.default,
            aten.linalg_inv_ex.default,
            aten._linalg_det.default,
            aten._linalg_slogdet.default,
            aten._linalg_eigh.default,
            aten._linalg_svd.default,
            aten.linalg_qr.default,
            aten.linalg_lu_factor_ex.default,
            aten.linalg_matrix_exp.default,
            aten.linalg_solve_triangular.default,
            aten.linalg_lu_solve.default,
            aten._linalg_solve_ex.default,
            aten.cholesky_solve.default,
            aten.lu_unpack.default,
            aten.linalg_householder_product.default,
        ],
        _batches,
    )
)

CONTIGUOUS[aten.linalg_lu_solve.default] = (0,)  # torch misreads a batch dim of size one with an odd stride
