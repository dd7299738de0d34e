"""Magnetotellurics: forward models, data, priors and inversion."""

from tutti.extras import extra

with extra("science"):
    from tutti.science.em.mt.mesh import Mesh2D, graded, skin_depth
    from tutti.science.em.mt.response.forward import MT2D, Linearization
    from tutti.science.em.mt.response.layered import layered, log_resistivity
    from tutti.science.em.mt.surveys.data import Data
    from tutti.science.em.mt.surveys.edi import read_edi, survey

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
