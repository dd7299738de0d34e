"""Voxels of solids: exact where faces lie in the planes of cells, and unbiased elsewhere."""

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tutti.science.em.cad import MATERIALS, Mesh, box, cone, cylinder, fill, material, sphere, voxelize
from tutti.science.em.cad.picture import picture

EDGES = np.linspace(0, 1, 21)
BALL = sphere((0.5, 0.5, 0.5), 0.3)


def volume(solid, edges=EDGES, samples=2):
    cell = np.prod([edges[1] - edges[0]] * 3)
    return fill(solid, edges, edges, edges, samples=samples).double().sum().item() * cell


def test_a_box_in_the_planes_of_cells_is_exact():
    filled = fill(box((0.1, 0.2, 0.3), (0.5, 0.4, 0.9)), EDGES, EDGES, EDGES)
    wanted = torch.zeros(20, 20, 20)
    wanted[2:10, 4:8, 6:18] = 1
    torch.testing.assert_close(filled, wanted, atol=1e-6, rtol=0)


def test_partly_filled_cells_along_rays():
    filled = fill(box((0, 0, 0.125), (1, 1, 0.26)), EDGES, EDGES, EDGES)
    wanted = torch.tensor([0, 0, 0.5, 1, 1, 0.2, 0])
    torch.testing.assert_close(filled[3, 4, :7], wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("solid", "exact"), [
    (sphere((0.5, 0.5, 0.5), 0.37), 4 / 3 * math.pi * 0.37**3),
    (cylinder((0.5, 0.5, 0.1), 0.3, 0.75), math.pi * 0.09 * 0.75),
    (cone((0.5, 0.5, 0.1), 0.4, 0.1, 0.6), math.pi * 0.6 / 3 * (0.16 + 0.04 + 0.01)),
    (sphere((0.5, 0.5, 0.5), 0.4) - sphere((0.5, 0.5, 0.5), 0.2), 4 / 3 * math.pi * (0.4**3 - 0.2**3)),
])  # fmt: skip
def test_volumes(solid, exact):
    assert volume(solid) == pytest.approx(exact, rel=1.2e-2)
    assert volume(solid, np.linspace(0, 1, 81)) == pytest.approx(exact, rel=2e-3)


def test_the_error_of_a_volume_has_no_sign():
    """A rotated box at random places."""
    rng = np.random.default_rng(0)
    solid = box((-0.2, -0.15, -0.1), (0.2, 0.15, 0.1)).rotated((1, 2, 3), 35)
    errors = [
        volume(solid.moved(0.5 + rng.uniform(-0.1, 0.1, 3)), samples=1) / (0.4 * 0.3 * 0.2) - 1 for _ in range(60)
    ]
    assert np.std(errors) < 0.02
    assert abs(np.mean(errors)) < 3 * np.std(errors) / len(errors) ** 0.5


def test_rays_through_edges_and_vertices_hit_once():
    """Rays in the planes of a mesh's diagonals and through its vertices."""
    edges = np.linspace(-1, 1, 9)
    rays = (edges[:-1] + edges[1:]) / 2
    solid = box((rays[1], rays[1], -0.5), (rays[6], rays[6], 0.5))
    hits = solid.crossings(rays, rays)
    per_ray = np.bincount(hits.ray, minlength=64)
    assert set(per_ray.tolist()) <= {0, 2} and (per_ray == 2).sum() == 25
    faces = [[0, 1, 2], [1, 3, 2], [3, 4, 2], [4, 0, 2], [1, 0, 5], [3, 1, 5], [4, 3, 5], [0, 4, 5]]
    octahedron = Mesh(np.concatenate([np.eye(3), -np.eye(3)]), np.array(faces))
    hits = octahedron.crossings(np.array([-0.5, 0.0, 0.5]), np.array([-0.5, 0.0, 0.5]))
    assert (hits.ray == 4).sum() == 2 and hits.z[hits.ray == 4].tolist() == [-1, 1]


def test_boolean_operations_equal_those_of_voxels():
    a, b = box((0.1, 0.1, 0.1), (0.6, 0.6, 0.6)), box((0.3, 0.3, 0.3), (0.9, 0.9, 0.9))
    x, y = (fill(s, EDGES, EDGES, EDGES) > 0.5 for s in (a, b))
    for solid, wanted in ((a | b, x | y), (a & b, x & y), (a - b, x & ~y), (b - a, y & ~x)):
        torch.testing.assert_close(fill(solid, EDGES, EDGES, EDGES), wanted.float(), atol=1e-6, rtol=0)


def test_solids_that_lie_apart_have_an_empty_intersection():
    none = box((0, 0, 0), (0.2, 0.2, 0.2)) & box((0.4, 0.1, 0.1), (0.9, 0.9, 0.9))
    assert (none.bounds()[0] == none.bounds()[1]).all()
    with pytest.warns(UserWarning, match="fills no cell of the grid"):
        assert fill(none, EDGES, EDGES, EDGES).sum() == 0


def test_later_solids_win_and_materials_are_averaged():
    board, patch = box((0, 0, 0), (1, 1, 0.2)), box((0.2, 0.2, 0.1), (0.5, 0.5, 0.2))
    voxels = voxelize({"board": (board, "fr4"), "patch": (patch, "copper")}, EDGES, EDGES, np.linspace(0, 0.4, 5))
    eps = voxels.eps_r()
    assert eps[0, 0].tolist() == pytest.approx([4.3, 4.3, 1, 1])
    assert eps[6, 6].tolist() == pytest.approx([4.3, 1, 1, 1])
    assert voxels.metal().sum() == 36
    assert voxels.volume("board") == pytest.approx(0.2 - 0.009)
    assert voxels.sigma(1e9)[0, 0, 0].item() == pytest.approx(2 * math.pi * 1e9 * 8.8541878e-12 * 4.3 * 0.02)


def test_open_surfaces_are_errors():
    solid = box((0, 0, 0), (1, 1, 1))
    with pytest.raises(ValueError, match="not closed: 3 of 33 edges"):
        Mesh(solid.vertices, solid.faces[1:])
    flipped = solid.faces.copy()
    flipped[0] = flipped[0, ::-1]
    with pytest.raises(ValueError, match="opposite orientation"):
        Mesh(solid.vertices, flipped)
    with pytest.raises(ValueError, match="not finite"):
        Mesh(solid.vertices * math.nan, solid.faces)


def test_inward_surfaces_are_turned():
    solid = box((0, 0, 0), (1, 1, 1))
    assert Mesh(solid.vertices, solid.faces[:, ::-1]).volume() == pytest.approx(1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: box((0, 0, 0), (1, 0, 1)), "high corner"),
    (lambda: sphere((0, 0, 0), -1), "radius must be positive"),
    (lambda: fill(box((0, 0, 0), (1, 1, 1)), [0, 1, 1], [0, 1], [0, 1]), "x must be 2 or more"),
    (lambda: fill(box((0, 0, 0), (1, 1, 1)), [0, 1], [0, 1], [0, 1], samples=0), "samples"),
    (lambda: material("coper"), "did you mean copper"),
    (lambda: picture(5, "a.png"), "voxels: of type Voxels, not 5"),
    (lambda: fill("a", EDGES, EDGES, EDGES), "solid: of type Solid, not 'a'"),
    (lambda: material(3), "no material 3; vacuum, air"),
    (lambda: box((0, 0), (1, 1)), "the corners of a box: x, y and z in metres, not .0, 0. and"),
    (lambda: BALL.rotated((0, 0, 0), 30), "axis of a rotation"),
    (lambda: BALL.rotated("z", 90), r"axis of a rotation: its direction, such as \(0, 0, 1\) for z, not 'z'"),
    (lambda: BALL.moved(1.0), "by: x, y and z in metres, not 1"),
    (lambda: BALL.scaled("mm"), "factor: a number, not .mm."),
    (lambda: sphere((0, 0), 1), r"centre: x, y and z in metres, not \(0, 0\)"),
    (lambda: sphere((0, 0, 0), 1, 1), "segments of a sphere: a whole number from 2, not 1"),
    (lambda: cone((0, 0, 0), 1, 1, 1, 2), "segments of a cone: a whole number from 3, not 2"),
    (lambda: cylinder((0, 0, 0), "a", 1), "radius must be positive and finite; got a"),
    (lambda: voxelize({"a": BALL}, EDGES, EDGES, EDGES), r"a: a solid and its material, .* not Mesh\(.*of a file: "),
    (lambda: voxelize({"a": (BALL, 4.3)}, EDGES, EDGES, EDGES), "a: a solid and its material"),
    (lambda: voxelize(BALL, EDGES, EDGES, EDGES), "solids: name -> .solid, material., not Mesh"),
    (lambda: voxelize({"a": (BALL, "fr4")}, EDGES, EDGES, EDGES).volume("b"), "no solid 'b'; there are a"),
    (lambda: picture(voxelize({"a": (BALL, "fr4")}, EDGES, EDGES, EDGES), "a.png", (0.5, 0.5, 5)),
     r"at: a point of the grid in metres, x from 0 to 1, .* not \(0.5, 0.5, 5\)"),
])  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_table_is_physical():
    assert all(m.eps_r >= 1 and m.sigma >= 0 for m in MATERIALS.values())


def test_a_picture_is_drawn(tmp_path):
    picture(voxelize({"ball": (sphere((0.5, 0.5, 0.5), 0.3), "ptfe")}, EDGES, EDGES, EDGES), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_solids_that_fill_nothing_or_all_are_told():
    there = box((0, 0, 2), (1, 1, 3))
    with pytest.warns(UserWarning, match="a, 0 to 1 x 0 to 1 x 2 to 3 m, lies outside of the grid, 0 to 1 x .*=1e-3"):
        voxelize({"a": (there, "fr4")}, EDGES, EDGES, EDGES)
    with pytest.warns(UserWarning, match="the solid, 0 to 1000 x .* lies outside"):
        fill(there.scaled(1e3), EDGES, EDGES, EDGES)
    wire = box((0.501, 0.501, 0), (0.502, 0.502, 1))
    with pytest.warns(UserWarning, match="wire, 0.501 to 0.502 x .* fills no cell of the grid"):
        assert voxelize({"wire": (wire, "copper")}, EDGES, EDGES, EDGES).volume("wire") == 0
    metres = box((-500, -500, -500), (500, 500, 500))
    with pytest.warns(UserWarning, match=r"part, -500 to 500 .* fills every cell of the grid, .*unit=1e-3"):
        voxelize({"part": (metres, "abs")}, EDGES, EDGES, EDGES)
    assert fill(box((-1e3, -1e3, -1e3), (1e3, 1e3, 0.5)), EDGES, EDGES, EDGES).mean() == 0.5  # half a space


@pytest.mark.parametrize("z", [EDGES, EDGES / 10, EDGES * 5], ids=["cube", "flat", "tall"])
def test_titles_and_legends_of_pictures_have_room(z, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_: figures.append(self))
    names = [f"solid number {i}" for i in range(9)]
    picture(voxelize({x: (box((0, 0, 0), (1, 1, 0.1)), "ptfe") for x in names}, EDGES, EDGES, z), tmp_path / "a.png")
    (figure,) = figures
    figure.draw_without_rendering()
    below = figure.legends[0].get_window_extent().y1
    for axes in figure.axes:
        assert axes.title.get_window_extent().y1 <= figure.bbox.y1
        assert axes.xaxis.label.get_window_extent().y0 >= below


def test_voxels_are_shown_in_a_line():
    text = repr(voxelize({"ball": (BALL.moved((0, 0, -0.4)), "ptfe")}, EDGES, EDGES, EDGES / 2))
    assert text == "Voxels(20 x 20 x 20 cells, 0 to 1 x 0 to 1 x 0 to 0.5 m; ball: eps_r 2.1, 0 S/m)"
    assert repr(box((0, 0, 0), (1, 2, 3)) | BALL) == "Combined((0.0, 0.0, 0.0) to (1.0, 2.0, 3.0) m)"


def test_rays_that_graze_edges_of_curved_solids():
    """Cylinders on their side at many places of a coarse grid, whose rays meet silhouettes."""
    edges = np.linspace(-1, 1, 21)
    lying = cylinder((0, 0, -0.5), 0.3, 1.0, segments=32).rotated((0, 1, 0), 90)
    for i in range(40):
        filled = fill(lying.moved((0.05 * (i % 7), 0.05 * (i // 7), 0.0)), edges, edges, edges, samples=1)
        assert filled.double().sum().item() * 1e-3 == pytest.approx(math.pi * 0.09, rel=0.12)


def test_volumes_far_from_the_origin():
    assert box((1e5, 1e5, 1e5), (1e5 + 1, 1e5 + 1, 1e5 + 2)).volume() == pytest.approx(2)
