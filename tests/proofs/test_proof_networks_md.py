"""A claim about networks: a liquid that moves with a trained SchNet is the liquid of the forces that it has learned.

Shorter than `benchmarks/mol_stable.py`, with its comparison of g(r).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tutti.science.mol.networks import NetworkPotential, compile_for_md
from tutti.science.mol.observables import standard_error

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stable():
    """The benchmark, with one thread as it runs alone."""
    paths, threads = [str(ROOT / "benchmarks"), str(ROOT / "runs")], torch.get_num_threads()
    sys.path[:0] = paths
    torch.set_num_threads(1)
    try:
        yield __import__("mol_stable")
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = [path for path in sys.path if path not in paths]
        for name in ("mol_stable", "md_schnet", "support", "harness"):
            sys.modules.pop(name, None)


def test_a_liquid_with_trained_forces_is_the_liquid(stable):
    """150 ps of argon: g(r), the temperature, and the energy at constant energy."""
    network, _ = stable.md_schnet.train(40, 1500)
    held_out = stable.md_schnet.samples([stable.md_schnet.LIQUID], 10, 200)
    assert stable.force_error(network, held_out)["relative"] < 0.05
    learned = stable.liquid(NetworkPotential(compile_for_md(network), ["Ar"] * 108), 1, 4000)
    reference = stable.liquid(None, 2, 4000)
    g, series = stable.distribution(learned, 30_000)
    comparison = stable.compare(g, stable.distribution(reference, 30_000)[0])
    assert comparison["bins"] > 50 and comparison["mean_error"] < 0.02
    assert comparison["within"] >= 0.9 and comparison["probability"] > 1e-3
    values = torch.tensor(series.temperature)
    assert float(values.mean()) == pytest.approx(94.4, abs=4 * standard_error(values))
    energies = [stable.constant_energy(x, 10_000) for x in (learned, reference)]
    for energy in energies:
        assert abs(energy["drift"]) < 0.01 and energy["fluctuation"] < 1e-3  # kJ/mol per atom and ns; kT is 0.78
    warmer = stable.compare(stable.distribution(stable.liquid(None, 3, 4000, 110.0), 30_000)[0], g)
    assert warmer["within"] < 0.6 and warmer["probability"] < 1e-6  # the comparison tells another temperature
