"""Magnetotellurics: forward models, data, priors and inversion."""

from tutti.extras import extra

with extra("science"):
    from tutti.science.em.mt.inverse.columns import Background, Bumps, Columns, Layer, Uniform
    from tutti.science.em.mt.inverse.inversion import Inversion
    from tutti.science.em.mt.inverse.mismatch import checked
    from tutti.science.em.mt.inverse.parameters import Coded, Pixel, Region
    from tutti.science.em.mt.inverse.posterior import ensemble, posterior
    from tutti.science.em.mt.inverse.vae import VAE
    from tutti.science.em.mt.mesh import Mesh2D, graded, skin_depth
    from tutti.science.em.mt.response.forward import MT2D, Linearization
    from tutti.science.em.mt.response.layered import layered, log_resistivity
    from tutti.science.em.mt.surveys.data import Data
    from tutti.science.em.mt.surveys.edi import Edi, read_edi, survey

__all__ = [
    "MT2D",
    "VAE",
    "Background",
    "Bumps",
    "Coded",
    "Columns",
    "Data",
    "Edi",
    "Inversion",
    "Layer",
    "Linearization",
    "Mesh2D",
    "Pixel",
    "Region",
    "Uniform",
    "checked",
    "ensemble",
    "graded",
    "layered",
    "log_resistivity",
    "posterior",
    "read_edi",
    "skin_depth",
    "survey",
]
