"""Electromagnetics: magnetotellurics (`mt`), finite differences in the time domain (`fdtd`), surrogates of solvers and
Fourier neural operators (`surrogate`), physics-informed networks (`pinn`)."""
