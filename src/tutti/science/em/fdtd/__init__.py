"""Finite differences in the time domain, differentiable: see `simulation`."""

from tutti.extras import extra

with extra("science"):
    from tutti.science.em.fdtd.cpml import CPML
    from tutti.science.em.fdtd.dispersion import Pole, drude, lorentz
    from tutti.science.em.fdtd.grid import Grid
    from tutti.science.em.fdtd.monitors import Energy, Probe, Snapshots, Spectrum
    from tutti.science.em.fdtd.planewave import PlaneWave
    from tutti.science.em.fdtd.ports import LinePlane, Port, s_parameters
    from tutti.science.em.fdtd.predict import Prediction, predict
    from tutti.science.em.fdtd.simulation import Result, Simulation
    from tutti.science.em.fdtd.sources import Current
    from tutti.science.em.fdtd.waveforms import gaussian, gaussian_up_to, pulse

__all__ = [
    "CPML",
    "Current",
    "Energy",
    "Grid",
    "LinePlane",
    "PlaneWave",
    "Pole",
    "Port",
    "Prediction",
    "Probe",
    "Result",
    "Simulation",
    "Snapshots",
    "Spectrum",
    "drude",
    "gaussian",
    "gaussian_up_to",
    "lorentz",
    "predict",
    "pulse",
    "s_parameters",
]
