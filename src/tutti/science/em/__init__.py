"""Electromagnetics: magnetotellurics (`mt`) and finite differences in the time domain (`fdtd`)."""
