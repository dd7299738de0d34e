"""Magnetotellurics: forward models, data, priors and inversion."""
