"""Surrogates of electromagnetic solvers: see `surrogate` and `active`; operators between fields in `fno`."""

from tutti.science.em.surrogate.geometry import Geometry as Geometry
from tutti.science.em.surrogate.geometry import relative_error as relative_error
from tutti.science.em.surrogate.parameters import Parameter as Parameter
from tutti.science.em.surrogate.parameters import Space as Space
from tutti.science.em.surrogate.samples import Samples as Samples
from tutti.science.em.surrogate.samples import collect as collect
from tutti.science.em.surrogate.surrogate import Prediction as Prediction
from tutti.science.em.surrogate.surrogate import Surrogate as Surrogate
from tutti.science.em.surrogate.surrogate import Training as Training
