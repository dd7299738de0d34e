"""Magnetotellurics: forward models, data, priors and inversion."""

from tutti.extras import extra

with extra("science"):
    from tutti.science.em.mt.data import Data
    from tutti.science.em.mt.edi import read_edi, survey
    from tutti.science.em.mt.forward import MT2D, Linearization
    from tutti.science.em.mt.layered import layered, log_resistivity
    from tutti.science.em.mt.mesh import Mesh2D, graded, skin_depth

__all__ = [
    "MT2D",
    "Data",
    "Linearization",
    "Mesh2D",
    "graded",
    "layered",
    "log_resistivity",
    "read_edi",
    "skin_depth",
    "survey",
]
