"""Finite differences in the time domain, differentiable: see `simulation`."""

from tutti.extras import extra

with extra("science"):
    from tutti.science.em.fdtd.excitation.planewave import PlaneWave
    from tutti.science.em.fdtd.excitation.ports import LinePlane, Port, s_parameters
    from tutti.science.em.fdtd.excitation.sources import Current
    from tutti.science.em.fdtd.excitation.waveforms import gaussian, gaussian_up_to, pulse
    from tutti.science.em.fdtd.grid import C0, Grid
    from tutti.science.em.fdtd.media.cpml import CPML
    from tutti.science.em.fdtd.media.dispersion import Pole, drude, lorentz
    from tutti.science.em.fdtd.media.subpixel import conductor, permittivity
    from tutti.science.em.fdtd.observation.farfield import scattering_width, surface
    from tutti.science.em.fdtd.observation.farfield3d import amplitude, cross_section, extinction, surface3d
    from tutti.science.em.fdtd.observation.monitors import Energy, Probe, Snapshots, Spectrum
    from tutti.science.em.fdtd.predict import Prediction, predict
    from tutti.science.em.fdtd.simulation import Result, Simulation

__all__ = [
    "C0",
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
    "amplitude",
    "conductor",
    "cross_section",
    "drude",
    "extinction",
    "gaussian",
    "gaussian_up_to",
    "lorentz",
    "permittivity",
    "predict",
    "pulse",
    "s_parameters",
    "scattering_width",
    "surface",
    "surface3d",
]
