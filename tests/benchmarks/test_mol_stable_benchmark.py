"""What the benchmarks of long runs with networks compute: probabilities, torsions, shares of bins."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["mol_stable", "mol_dipeptide"])
def benchmark(request):
    paths = [str(ROOT / "benchmarks"), str(ROOT / "runs")]
    sys.path[:0] = paths
    try:
        yield importlib.import_module(request.param)
    finally:
        sys.path[:] = [path for path in sys.path if path not in paths]
        for name in ("mol_stable", "mol_dipeptide", "mol_training", "md_schnet", "support", "harness"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("benchmark", ["mol_stable"], indirect=True)
def test_hotellings_test_of_one_variable_is_students(benchmark):
    from scipy.stats import kstest, ttest_ind

    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, 1, generator=draw, dtype=torch.float64) + x for x in (0.0, 0.4))
    assert benchmark.hotelling(a, b) == pytest.approx(float(ttest_ind(a, b).pvalue[0]))
    mix = torch.randn(10, 10, generator=draw, dtype=torch.float64)
    same = [benchmark.hotelling(*(torch.randn(2, 40, 10, generator=draw, dtype=torch.float64) @ mix))
            for _ in range(200)]  # fmt: skip
    assert kstest(same, "uniform").pvalue > 0.01


@pytest.mark.parametrize("benchmark", ["mol_stable"], indirect=True)
def test_distributions_that_differ_are_told_apart(benchmark):
    def measured(shift: float, seed: int):
        g = benchmark.RadialDistribution(0.85, 85)
        draw = torch.Generator().manual_seed(seed)
        noise = 0.1 * torch.randn(400, 85, generator=draw, dtype=torch.float64)
        g.each = list((g.r > 0.3) * (1 + noise + shift * torch.sin(20 * g.r)))
        return g

    same, other = (benchmark.compare(measured(0.0, 1), measured(shift, 2)) for shift in (0.0, 0.05))
    assert same["bins"] == other["bins"] == 55
    assert same["within"] > 0.9 and same["probability"] > 0.01
    assert other["within"] < 0.5 and other["probability"] < 1e-6


@pytest.mark.parametrize("benchmark", ["mol_dipeptide"], indirect=True)
def test_torsions_are_those_of_ase(benchmark):
    from ase import Atoms

    x = torch.randn(5, 22, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for atoms in benchmark.TORSIONS.values():
        expected = [Atoms("C22", frame.numpy()).get_dihedral(*atoms) for frame in x]
        assert [float(a) % 360 for a in benchmark.torsion(x, atoms)] == pytest.approx(expected)
    assert float(benchmark.histogram(x, atoms).sum()) == pytest.approx(1)


@pytest.mark.parametrize("benchmark", ["mol_dipeptide"], indirect=True)
def test_bonds_that_differ_are_told_apart(benchmark):
    draw = torch.Generator().manual_seed(0)
    one = torch.arange(22, dtype=torch.float64)[:, None] * 0.1 + torch.zeros(3)
    frames = one + 0.003 * torch.randn(2, 400, 22, 3, generator=draw, dtype=torch.float64)
    bonds = torch.tensor([[k, k + 1] for k in range(21)])
    same, longer = benchmark.compare(*frames, bonds), benchmark.compare(1.01 * frames[0], frames[1], bonds)
    assert same["within"] > 0.85 and same["bond_mean"] < 1 and same["bond_spread"] < 1
    assert longer["within"] == 0 and longer["bond_mean"] == pytest.approx(1.73, abs=0.5)
