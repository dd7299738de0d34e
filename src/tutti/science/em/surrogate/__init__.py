"""Surrogates of electromagnetic solvers: see `surrogate` and `active`; operators between fields in `fno`."""

from tutti.extras import extra

with extra("science"):
    from tutti.science.em.surrogate.fno import FNO
    from tutti.science.em.surrogate.geometry import Geometry, relative_error
    from tutti.science.em.surrogate.parameters import Parameter, Space
    from tutti.science.em.surrogate.samples import Samples, collect
    from tutti.science.em.surrogate.surrogate import Prediction, Surrogate, Training

__all__ = [
    "FNO",
    "Geometry",
    "Parameter",
    "Prediction",
    "Samples",
    "Space",
    "Surrogate",
    "Training",
    "collect",
    "relative_error",
]
