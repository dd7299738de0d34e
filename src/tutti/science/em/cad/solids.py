"""Solids: triangle meshes and their unions, differences and intersections.

>>> plate = box((0, 0, 0), (4, 4, 1)) - cylinder((2, 2, -1), 1.0, 3.0)
>>> plate.bounds().tolist()
[[0.0, 0.0, 0.0], [4.0, 4.0, 1.0]]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Real

import numpy as np

from tutti.science.em.bounds import check_number, check_whole
from tutti.science.em.cad.rays import Crossings, cast
from tutti.science.em.shown import brief

Point = Sequence[float]


def _without(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return first & ~second


def _three(what: str, point: Point) -> np.ndarray:
    """Raises ValueError unless given are three finite numbers."""
    try:
        numbers = np.asarray(point, float)
    except (TypeError, ValueError):
        numbers = np.zeros(0)
    if numbers.shape != (3,) or not np.isfinite(numbers).all():
        raise ValueError(f"{what}, not {brief(point)}")
    return numbers


class Solid:
    """Something with an inside. Lengths are in metres. `|`, `-` and `&` combine solids."""

    def crossings(self, xs: np.ndarray, ys: np.ndarray) -> Crossings:
        """Where rays along z through all pairs of xs and ys (sorted) enter and leave it."""
        raise NotImplementedError

    def bounds(self) -> np.ndarray:
        """Lowest and highest corner of a box around it, (2, 3)."""
        raise NotImplementedError

    def transformed(self, matrix: np.ndarray) -> Solid:
        """Under an affine map, (3, 4)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        low, high = (tuple(float(f"{x:.4g}") for x in corner) for corner in self.bounds())
        return f"{type(self).__name__}({low} to {high} m)"

    def moved(self, by: Point) -> Solid:
        return self.transformed(np.column_stack([np.eye(3), _three("by: x, y and z in metres", by)]))

    def scaled(self, factor: float) -> Solid:
        """About the origin; 1e-3 for a file in millimetres."""
        check_number("factor", factor)
        return self.transformed(np.column_stack([factor * np.eye(3), np.zeros(3)]))

    def rotated(self, axis: Point, degrees: float) -> Solid:
        """About an axis through the origin, counterclockwise seen from its tip (Rodrigues). axis: its direction, such
        as (0, 0, 1) for z."""
        along = _three("axis of a rotation: its direction, such as (0, 0, 1) for z", axis)
        if not np.linalg.norm(along) > 0:
            raise ValueError(f"axis of a rotation: three numbers, not all 0, not {tuple(axis)}")
        x, y, z = along / np.linalg.norm(along)
        k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
        a = np.radians(degrees)
        return self.transformed(np.column_stack([np.eye(3) + np.sin(a) * k + (1 - np.cos(a)) * k @ k, np.zeros(3)]))

    def __or__(self, other: Solid) -> Solid:
        return Combined(self, other, operator.or_)

    def __and__(self, other: Solid) -> Solid:
        return Combined(self, other, operator.and_)

    def __sub__(self, other: Solid) -> Solid:
        if isinstance(self, Combined) and self.inside is _without:
            return Combined(self.first, self.second | other, _without)  # few rays meet what is taken away
        return Combined(self, other, _without)


class Combined(Solid):
    """Two solids under a Boolean operation."""

    def __init__(self, first: Solid, second: Solid, inside: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        self.first, self.second, self.inside = first, second, inside

    def crossings(self, xs: np.ndarray, ys: np.ndarray) -> Crossings:
        return self.first.crossings(xs, ys).combined(self.second.crossings(xs, ys), self.inside)

    def bounds(self) -> np.ndarray:
        a, b = self.first.bounds(), self.second.bounds()
        if self.inside is operator.or_:
            return np.stack([np.minimum(a[0], b[0]), np.maximum(a[1], b[1])])
        if self.inside is not operator.and_:
            return a
        low, high = np.maximum(a[0], b[0]), np.minimum(a[1], b[1])
        return np.stack([low, high if (low < high).all() else low])  # nothing is common to boxes that lie apart

    def transformed(self, matrix: np.ndarray) -> Solid:
        return Combined(self.first.transformed(matrix), self.second.transformed(matrix), self.inside)


class Mesh(Solid):
    """A closed surface of triangles. vertices: (n, 3) in metres. faces: (m, 3), counterclockwise seen from outside.

    Equal vertices are merged. Raises ValueError for a surface with holes, with faces that disagree about the outside,
    or with numbers that are not finite.
    """

    def __init__(self, vertices: np.ndarray, faces: np.ndarray, name: str = "the surface") -> None:
        vertices, faces = np.asarray(vertices, float), np.asarray(faces, np.int64)
        if not len(faces):
            raise ValueError(f"{name} has no triangles")
        if not np.isfinite(vertices).all():
            raise ValueError(f"{name} has vertices that are not finite")
        self.vertices, index = np.unique(vertices, axis=0, return_inverse=True)
        faces = index.reshape(-1)[faces]
        flat = (faces[:, 0] == faces[:, 1]) | (faces[:, 1] == faces[:, 2]) | (faces[:, 2] == faces[:, 0])
        self.faces = faces[~flat]
        self._check(name)
        if self.volume() < 0:
            self.faces = self.faces[:, ::-1]

    def _check(self, name: str) -> None:
        """Each edge must run as often one way as the other."""
        edges = np.concatenate([self.faces[:, [k, (k + 1) % 3]] for k in range(3)])
        n = len(self.vertices)
        keys = np.concatenate([edges[:, 0] * n + edges[:, 1], edges[:, 1] * n + edges[:, 0]])
        keys, index = np.unique(keys, return_inverse=True)
        balance = np.bincount(index.reshape(-1), np.repeat([1, -1], len(edges)))  # of each direction of an edge
        loose = keys[balance > 0]
        if len(loose):
            at = self.vertices[loose[0] // n]
            raise ValueError(
                f"{name} is not closed: {len(loose)} of {len(edges)} edges have no triangle on their other side, or one"
                f" of the opposite orientation; the first is near {tuple(float(f'{x:.6g}') for x in at)}. Repair it,"
                " for instance by trimesh.repair, or export it as a solid"
            )

    def volume(self) -> float:
        """In cubic metres (the divergence theorem)."""
        a, b, c = (self.vertices[self.faces[:, k]] - self.vertices.mean(0) for k in range(3))
        return float(np.einsum("ij,ij->", a, np.cross(b, c)) / 6)

    def crossings(self, xs: np.ndarray, ys: np.ndarray) -> Crossings:
        return cast(self.vertices, self.faces, xs, ys)

    def bounds(self) -> np.ndarray:
        return np.stack([self.vertices.min(0), self.vertices.max(0)])

    def transformed(self, matrix: np.ndarray) -> Mesh:
        return Mesh(self.vertices @ matrix[:, :3].T + matrix[:, 3], self.faces)


def _positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not (isinstance(size, Real) and 0 < size < np.inf):
            raise ValueError(f"{name} must be positive and finite; got {size}")


def box(low: Point, high: Point) -> Mesh:
    """An upright box between two corners."""
    if len(low) != 3 or len(high) != 3:
        raise ValueError(f"the corners of a box: x, y and z in metres, not {tuple(low)} and {tuple(high)}")
    size = np.asarray(high, float) - np.asarray(low, float)
    if not (size > 0).all():
        raise ValueError(f"the high corner of a box must exceed the low one: got {tuple(low)} and {tuple(high)}")
    corners = np.array([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)], float) * size + low
    quads = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    return Mesh(corners, np.array([t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))]))


def cone(base: Point, radius: float, top: float, height: float, segments: int = 128) -> Mesh:
    """An upright truncated cone: `radius` at z = base, `top` at the other end; the polygon has the circle's area."""
    _positive(radius=radius, top=top, height=height)
    check_whole("a cone", 3, segments=segments)
    turn = 2 * np.pi * np.arange(segments) / segments
    fit = np.sqrt(2 * np.pi / segments / np.sin(2 * np.pi / segments))
    ring = np.column_stack([np.cos(turn), np.sin(turn), np.zeros(segments)]) * fit
    lower, upper = ring * radius, ring * top + [0, 0, height]
    vertices = np.concatenate([lower, upper, [[0, 0, 0], [0, 0, height]]]) + _three("base: x, y and z in metres", base)
    i, j = np.arange(segments), (np.arange(segments) + 1) % segments
    s, low, high = segments, np.full(segments, 2 * segments), np.full(segments, 2 * segments + 1)
    faces = [(i, j, s + j), (i, s + j, s + i), (low, j, i), (high, s + i, s + j)]
    return Mesh(vertices, np.concatenate([np.column_stack(each) for each in faces]))


def cylinder(base: Point, radius: float, height: float, segments: int = 128) -> Mesh:
    """An upright cylinder from its base; the polygon has the circle's area."""
    return cone(base, radius, radius, height, segments)


def sphere(centre: Point, radius: float, segments: int = 64) -> Mesh:
    """A sphere of latitudes and 2 x `segments` longitudes, with the volume of the ball."""
    _positive(radius=radius)
    check_whole("a sphere", 2, segments=segments)
    polar = np.pi * np.arange(1, segments) / segments
    turn = np.pi * np.arange(2 * segments) / segments
    around = np.stack(np.broadcast_arrays(
        np.sin(polar)[:, None] * np.cos(turn), np.sin(polar)[:, None] * np.sin(turn), np.cos(polar)[:, None]
    ), -1).reshape(-1, 3)  # fmt: skip
    vertices = np.concatenate([around, [[0, 0, 1], [0, 0, -1]]])
    n, i = 2 * segments, np.arange(2 * segments)
    j = (i + 1) % n
    rings = [(a * n, a * n + n) for a in range(segments - 2)]
    faces = [each for a, b in rings for each in ((a + i, b + i, b + j), (a + i, b + j, a + j))]
    last = (segments - 2) * n
    faces += [(np.full(n, len(vertices) - 2), i, j), (np.full(n, len(vertices) - 1), last + j, last + i)]
    unit = Mesh(vertices, np.concatenate([np.column_stack(each) for each in faces]))
    fit = (4 / 3 * np.pi / unit.volume()) ** (1 / 3)
    return Mesh(unit.vertices * fit * radius + _three("centre: x, y and z in metres", centre), unit.faces)
