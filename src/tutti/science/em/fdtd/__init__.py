"""Finite differences in the time domain, differentiable: see `simulation`."""

from tutti.science.em.fdtd.cpml import CPML as CPML
from tutti.science.em.fdtd.dispersion import Pole as Pole
from tutti.science.em.fdtd.dispersion import drude as drude
from tutti.science.em.fdtd.dispersion import lorentz as lorentz
from tutti.science.em.fdtd.grid import Grid as Grid
from tutti.science.em.fdtd.monitors import Energy as Energy
from tutti.science.em.fdtd.monitors import Probe as Probe
from tutti.science.em.fdtd.monitors import Snapshots as Snapshots
from tutti.science.em.fdtd.monitors import Spectrum as Spectrum
from tutti.science.em.fdtd.planewave import PlaneWave as PlaneWave
from tutti.science.em.fdtd.ports import LinePlane as LinePlane
from tutti.science.em.fdtd.ports import Port as Port
from tutti.science.em.fdtd.ports import s_parameters as s_parameters
from tutti.science.em.fdtd.predict import Prediction as Prediction
from tutti.science.em.fdtd.predict import predict as predict
from tutti.science.em.fdtd.simulation import Result as Result
from tutti.science.em.fdtd.simulation import Simulation as Simulation
from tutti.science.em.fdtd.sources import Current as Current
from tutti.science.em.fdtd.waveforms import gaussian as gaussian
from tutti.science.em.fdtd.waveforms import gaussian_up_to as gaussian_up_to
from tutti.science.em.fdtd.waveforms import pulse as pulse
