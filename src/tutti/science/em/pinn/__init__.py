"""Physics-informed networks: `helmholtz`, and Maxwell's equations in the time domain, `maxwell`."""

from tutti.science.em.pinn.helmholtz import Helmholtz
from tutti.science.em.pinn.maxwell import Fields, PointSource
from tutti.science.em.pinn.network import MultiScale

__all__ = ["Fields", "Helmholtz", "MultiScale", "PointSource"]
