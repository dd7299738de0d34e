"""Engines beside one another: replicas, disaggregation, prediction of a service."""
