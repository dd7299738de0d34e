"""Inversion: parameters, learned priors, posterior, and how near a model is to the truth."""
