"""Physics-informed networks: `helmholtz`, and Maxwell's equations in the time domain, `maxwell`."""

from tutti.science.em.pinn.helmholtz import Helmholtz as Helmholtz
from tutti.science.em.pinn.network import MultiScale as MultiScale
