"""Monitoring: what every rank did in some steps, and what that says."""
