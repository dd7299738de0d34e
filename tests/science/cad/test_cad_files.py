"""Solids read from files of CAD programs."""

import math
import os

import numpy as np
import pytest
import trimesh

from tutti.science.em.cad import Mesh, read
from tutti.science.em.cad.files import _initialize

try:
    import gmsh
except (ImportError, OSError) as error:  # OSError: a library of the system that its window needs
    gmsh = None
    WHY = str(error)
else:
    WHY = ""
needs_gmsh = pytest.mark.skipif(gmsh is None, reason=f"gmsh cannot be loaded: {WHY}")


@pytest.mark.parametrize("kind", ["stl", "ply", "obj", "off"])
def test_triangles_in_millimetres(tmp_path, kind):
    trimesh.creation.box(extents=(10, 20, 30)).export(tmp_path / f"part.{kind}")
    (solid,) = read(tmp_path / f"part.{kind}").values()
    assert solid.volume() == pytest.approx(6e-6)
    np.testing.assert_allclose(solid.bounds(), [[-0.005, -0.01, -0.015], [0.005, 0.01, 0.015]])


@needs_gmsh
@pytest.mark.parametrize("kind", ["step", "brep"])
def test_parametric_solids(tmp_path, kind):
    path = tmp_path / f"part.{kind}"
    _initialize()
    gmsh.option.setNumber("General.Verbosity", 1)
    block = gmsh.model.occ.addBox(0, 0, 0, 40, 30, 5)
    hole = gmsh.model.occ.addCylinder(20, 15, -1, 0, 0, 7, 8)
    gmsh.model.occ.cut([(3, block)], [(3, hole)])
    gmsh.model.occ.addSphere(100, 0, 0, 10)
    gmsh.model.occ.synchronize()
    gmsh.write(str(path))
    gmsh.finalize()
    plate, ball = sorted(read(path).values(), key=Mesh.volume, reverse=True)
    assert plate.volume() == pytest.approx((40 * 30 - math.pi * 64) * 5e-9, rel=2e-3)
    assert ball.volume() == pytest.approx(4 / 3 * math.pi * 1e-6, rel=2e-2)
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):  # as before gmsh
        os.write(writer, b"x")
    os.close(writer)


def test_open_surfaces_name_file_and_place(tmp_path):
    mesh = trimesh.creation.box(extents=(1, 1, 1))
    mesh.faces = mesh.faces[:-1]
    mesh.export(tmp_path / "open.stl")
    with pytest.raises(ValueError, match=r"of open\.stl is not closed: 3 of 33 edges"):
        read(tmp_path / "open.stl")


def test_unknown_formats(tmp_path):
    (tmp_path / "part.dwg").write_text("")
    with pytest.raises(ValueError, match="no known format"):
        read(tmp_path / "part.dwg")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read(tmp_path / "part.step")


@needs_gmsh
def test_units_are_numbers(tmp_path):
    with pytest.raises(ValueError, match="unit: metres of a unit of the file, 1e-3 for millimetres, not 'mm'"):
        read(tmp_path / "part.stl", unit="mm")


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "part.step").write_text("hello")
    with pytest.raises(ValueError, match=r"part\.step"):
        read(tmp_path / "part.step")


def test_parts_lie_where_the_file_places_them(tmp_path):
    scene, part = trimesh.Scene(), trimesh.creation.box(extents=(10, 10, 10))
    scene.add_geometry(part, node_name="left", geom_name="part")
    place = trimesh.transformations.translation_matrix((100, 0, 0))
    scene.add_geometry(part, node_name="right", geom_name="other", transform=place)
    (tmp_path / "parts.3mf").write_bytes(scene.export(file_type="3mf"))
    bounds = sorted(solid.bounds()[0, 0] for solid in read(tmp_path / "parts.3mf").values())
    assert bounds == pytest.approx([-0.005, 0.095])
