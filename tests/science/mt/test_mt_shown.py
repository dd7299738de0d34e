"""What is printed of results: shapes and key numbers, not tensors."""

import pytest
import torch

from tutti.science.em.mt import MT2D, Data
from tutti.science.em.mt.inverse.columns import Columns
from tutti.science.em.mt.inverse.inversion import Inversion
from tutti.science.em.mt.inverse.mismatch import Mismatch
from tutti.science.em.mt.inverse.parameters import Pixel
from tutti.science.em.mt.inverse.posterior import posterior
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.surveys.edi import Edi
from tutti.science.em.mt.surveys.synthetic import basin_setting
from tutti.science.em.shown import Brief


def test_results_are_a_line():
    mesh = Mesh2D.for_survey([100.0, 10.0], [0.0, 300.0], (10, 100), growth=1.5)
    problem = MT2D(mesh, [100.0, 10.0], [0.0, 300.0], threads=1)
    data = Data.synthetic(problem, torch.full(mesh.shape, 1.8))
    inversion = Inversion(problem, data, steps=2)
    result = inversion.run(Pixel(mesh))
    assert repr(result).startswith(f"Result(chi={result.chi:.6g}, misfit=") and "reached=True" in repr(result)
    assert f"model=float64 {mesh.shape} from" in repr(result) and "count=16" in repr(data)
    for x in (data, result, posterior(inversion, result), mesh, problem, Mismatch(1.0, torch.ones(50), ())):
        assert "tensor" not in repr(x) and len(repr(x)) < 400


@pytest.mark.parametrize("kind", [Edi, Columns, type(basin_setting())])
def test_inputs_too(kind):
    assert kind.__repr__ is Brief.__repr__


def test_a_mesh_shows_its_shape_and_ends():
    mesh = Mesh2D(range(-500, 600, 100), [0, 10, 20])
    assert repr(mesh) == "Mesh2D(shape=(2, 10), x_edges=11 numbers from -500 to 500, z_edges=(0.0, 10.0, 20.0))"
