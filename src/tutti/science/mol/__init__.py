"""Molecular dynamics: a `System`, potentials (`terms`, `forcefield`, `networks`), and what moves the atoms."""
