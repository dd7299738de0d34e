"""The benchmark of training on alanine dipeptide, in its quick form."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(PATH))
    try:
        yield importlib.import_module("mol_training")
    finally:
        sys.path.remove(str(PATH))


def test_elements_follow_from_masses_and_samples_are_of_different_temperatures(benchmark):
    species = benchmark.alanine_dipeptide()[0].species
    assert torch.bincount(species)[[1, 6, 7, 8]].tolist() == [12, 6, 2, 2]
    energies, positions, forces = benchmark.sample(4, 3, 1, warm=200, every=10)
    assert energies.shape == (3, 4) and positions.shape == forces.shape == (3, 4, 22, 3)
    structures = benchmark.structures((energies, positions, forces), species)
    assert len(structures) == 12 and float(structures[4].forces.norm()) == pytest.approx(
        float(forces[1, 0].norm()) * benchmark.factor("force", benchmark.MD, benchmark.ELECTRONVOLT))  # fmt: skip
    assert float(energies[-1, 3]) > float(energies[-1, 0])  # 600 K and 300 K


def test_networks_learn(benchmark):
    results = benchmark.run(True)
    assert list(results["networks"]) == ["SchNet", "PaiNN", "MolCT"]
    assert results["train"] == results["held_out"] == 24
    for name, row in results["networks"].items():
        assert row["errors"]["force_mae"] < 0.9 * results["baseline"]["force_mae"], name
