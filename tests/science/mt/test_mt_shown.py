"""What is printed of results: shapes and key numbers, not tensors."""

from dataclasses import dataclass

import pytest
import torch

from tutti.science.em.mt import MT2D, Data
from tutti.science.em.mt.columns import Columns
from tutti.science.em.mt.edi import Edi
from tutti.science.em.mt.inversion import Inversion
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.mismatch import Mismatch
from tutti.science.em.mt.parameters import Pixel
from tutti.science.em.mt.posterior import posterior
from tutti.science.em.mt.shown import shown
from tutti.science.em.mt.synthetic import basin_setting


@dataclass(frozen=True)
class Example:
    values: torch.Tensor
    places: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 9.0)
    size: float = 1 / 3

    __repr__ = shown


def test_shapes_and_ranges_stand_for_tensors_and_long_tuples():
    nan = torch.tensor([[1.5, torch.nan], [-2.0, 0.0]])
    assert repr(Example(nan)) == "Example(values=(2, 2) from -2 to 1.5, places=5 from 1 to 9, size=0.3333)"
    assert "values=(0,)," in repr(Example(torch.zeros(0))) and "from 1 to 1," in repr(Example(torch.tensor([1j])))


def test_results_are_a_line():
    mesh = Mesh2D.for_survey([100.0, 10.0], [0.0, 300.0], (10, 100), growth=1.5)
    problem = MT2D(mesh, [100.0, 10.0], [0.0, 300.0], threads=1)
    data = Data.synthetic(problem, torch.full(mesh.shape, 1.8))
    inversion = Inversion(problem, data, steps=2)
    result = inversion.run(Pixel(mesh))
    assert repr(result).startswith(f"Result(chi={result.chi:.4g}, misfit=") and "reached=True" in repr(result)
    assert f"model={mesh.shape} from" in repr(result) and "count=16" in repr(data)
    for x in (data, result, posterior(inversion, result), mesh, problem, Mismatch(1.0, torch.ones(50), ())):
        assert "tensor" not in repr(x) and len(repr(x)) < 400


@pytest.mark.parametrize("kind", [Edi, Columns, type(basin_setting())])
def test_inputs_too(kind):
    assert not hasattr(kind.__repr__, "__wrapped__"), "dataclasses wrap the repr that they make"
