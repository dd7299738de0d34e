"""Monitors, far fields, energy, and whether a run is long enough."""
