"""Batches of small matrices that are far from singular."""

import torch

from tutti.check.samples.sample import Draw, samples

aten = torch.ops.aten
F64 = torch.float64


def symmetric(d: Draw) -> torch.Tensor:
    """Positive definite."""
    n = d.pick([1, 2, 3])
    x = d.floats(*d.shape(0, 2), n, n, dtype=F64)
    return x @ x.mT + 0.5 * torch.eye(n, dtype=F64)


@samples(aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default, aten._linalg_det.default,
         aten._linalg_slogdet.default, aten._linalg_eigh.default, aten._linalg_svd.default, aten.linalg_qr.default,
         aten.linalg_lu_factor_ex.default, aten.linalg_matrix_exp.default)  # fmt: skip
def decomposed(d: Draw):
    return (symmetric(d),), {}


def right_side(d: Draw, x: torch.Tensor) -> torch.Tensor:
    return d.floats(*x.shape[:-1], d.pick([1, 2]), dtype=F64)


@samples(aten.linalg_solve_triangular.default)
def solve_triangular(d: Draw):
    x = symmetric(d)
    return (x, right_side(d, x)), {"upper": d.flag()}


@samples(aten._linalg_solve_ex.default)
def solve(d: Draw):
    x = symmetric(d)
    return (x, right_side(d, x)), {}


@samples(aten.linalg_lu_solve.default)
def lu_solve(d: Draw):
    x = symmetric(d)
    return (*aten.linalg_lu_factor_ex(x)[:2], right_side(d, x)), {}


@samples(aten.cholesky_solve.default)
def cholesky_solve(d: Draw):
    x = symmetric(d)
    return (right_side(d, x), torch.linalg.cholesky(x)), {}


@samples(aten.lu_unpack.default)
def lu_unpack(d: Draw):
    return torch.linalg.lu_factor(symmetric(d)), {}


@samples(aten.linalg_householder_product.default)
def householder_product(d: Draw):
    return torch.geqrf(symmetric(d)), {}
