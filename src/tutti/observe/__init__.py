"""Monitoring: record what every rank does in some steps, and diagnose it."""
