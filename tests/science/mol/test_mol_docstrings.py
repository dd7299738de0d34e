"""The examples of docstrings run."""

import doctest
import importlib

import pytest

MODULES = (
    "units", "system", "cell", "neighbors", "potential", "terms.lennard_jones", "terms.coulomb", "terms.ewald",
    "terms.pme", "terms.special_pairs", "terms.exclusions", "forcefield.water",
    "networks.potential",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"tutti.science.mol.{name}")
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted and not result.failed
