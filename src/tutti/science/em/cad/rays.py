"""Where vertical rays enter and leave solids: scanline ray casting of triangle meshes.

Rays run along z through every pair of `xs` and `ys`. A ray through a shared edge hits exactly one of its two triangles:
the edge function is computed from the same end for both, so that both see the same bits, and a tie goes to one side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

AT_ONCE = 1 << 21  # pairs of triangle and ray in memory


@dataclass(frozen=True)
class Crossings:
    """Crossings sorted by ray and z. ray: its number, x major (n). z (n). change: +1 where the ray enters, -1 where it
    leaves (n)."""

    ray: np.ndarray
    z: np.ndarray
    change: np.ndarray

    @staticmethod
    def sorted(ray: np.ndarray, z: np.ndarray, change: np.ndarray) -> Crossings:
        order = np.lexsort((-change, z, ray))  # at one place a ray enters before it leaves
        return Crossings(ray[order], z[order], change[order])

    def only(self, which: np.ndarray) -> Crossings:
        """Those of some rays: which, by number of a ray."""
        mask = which[self.ray]
        return Crossings(self.ray[mask], self.z[mask], self.change[mask])

    def combined(self, other: Crossings, inside: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Crossings:
        """The crossings of a solid that is `inside(in self, in other)`, which must be False outside of both."""
        mine, theirs = np.zeros((2, max(self.ray.max(initial=-1), other.ray.max(initial=-1)) + 1), bool)
        mine[self.ray], theirs[other.ray] = True, True
        parts = [self.only(mine & theirs)._merged(other.only(mine & theirs), inside)]
        yes, no = np.ones(1, bool), np.zeros(1, bool)
        if inside(yes, no)[0]:
            parts.append(self.only(~theirs))
        if inside(no, yes)[0]:
            parts.append(other.only(~mine))
        ray, z, change = (np.concatenate([getattr(x, name) for x in parts]) for name in ("ray", "z", "change"))
        order = np.argsort(ray, kind="stable")
        return Crossings(ray[order], z[order], change[order])

    def _merged(self, other: Crossings, inside: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Crossings:
        ray, z = np.concatenate([self.ray, other.ray]), np.concatenate([self.z, other.z])
        order = np.lexsort((z, ray))
        first = np.concatenate([self.change, np.zeros_like(other.change)])[order].cumsum() > 0
        second = np.concatenate([np.zeros_like(self.change), other.change])[order].cumsum() > 0
        state = inside(first, second).astype(np.int8)
        change = np.diff(state, prepend=np.int8(0))  # every ray ends outside
        changes = change != 0
        return Crossings(ray[order][changes], z[order][changes], change[changes])


def cast(vertices: np.ndarray, faces: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> Crossings:
    """The crossings of a closed surface. vertices: (n, 3), without duplicates. faces: (m, 3), outward. xs, ys: sorted.

    Parts of the surface that overlap count as one solid.
    """
    corners = vertices[faces]  # (m, 3, 3)
    low, high = corners.min(1), corners.max(1)
    x0, x1 = np.searchsorted(xs, low[:, 0]), np.searchsorted(xs, high[:, 0], side="right")
    y0, y1 = np.searchsorted(ys, low[:, 1]), np.searchsorted(ys, high[:, 1], side="right")
    counts = np.where(_area(*corners.swapaxes(0, 1)) != 0, (x1 - x0) * (y1 - y0), 0)  # upright walls are not crossed
    hits_of_parts = [_hits(vertices, faces, part, xs, ys, x0, y0, y1 - y0, counts) for part in _parts(counts)]
    ray, z, change = (np.concatenate(each) for each in zip(*hits_of_parts, strict=True))
    hits = Crossings.sorted(ray, z, change)
    depth = hits.change.cumsum()
    per_ray = np.bincount(hits.ray, hits.change)
    gap = np.diff(hits.z, append=np.inf)  # where a ray grazes an edge, rounding may swap entry and exit
    if per_ray.any() or (gap[depth < 0] > 1e-9 * np.ptp(vertices, axis=0).max()).any():
        raise ValueError(
            "a ray leaves the solid more often than it enters: faces must point outwards and the surface be closed"
        )
    inside = depth > 0
    changes = inside != np.concatenate([[False], inside[:-1]])
    return Crossings(hits.ray[changes], hits.z[changes], hits.change[changes])


def _area(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Twice the area of triangles seen from above, positive if they face up."""
    return (b[:, 0] - a[:, 0]) * (c[:, 1] - a[:, 1]) - (b[:, 1] - a[:, 1]) * (c[:, 0] - a[:, 0])


def _parts(counts: np.ndarray) -> list[np.ndarray]:
    """Triangles that meet rays, in groups of about AT_ONCE pairs."""
    there = np.flatnonzero(counts)
    if not len(there):
        return [there]
    return np.split(there, np.flatnonzero(np.diff(counts[there].cumsum() // AT_ONCE)) + 1)


def _hits(
    vertices: np.ndarray,
    faces: np.ndarray,
    part: np.ndarray,
    xs: np.ndarray,
    ys: np.ndarray,
    x0: np.ndarray,
    y0: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ray, z and change of each hit of some triangles."""
    n = counts[part]
    triangle = np.repeat(np.arange(len(part)), n)
    number = np.arange(len(triangle)) - np.repeat(n.cumsum() - n, n)
    wide = np.maximum(rows[part], 1)[triangle]
    i, j = x0[part][triangle] + number // wide, y0[part][triangle] + number % wide
    x, y = xs[i], ys[j]
    face = faces[part]
    a, b, c = (vertices[face[:, k]] for k in range(3))
    up = np.sign(_area(a, b, c))
    inside = np.ones(len(triangle), bool)
    for k in range(3):
        ends = face[:, [k, (k + 1) % 3]]
        forward = np.where(ends[:, 0] < ends[:, 1], 1.0, -1.0)
        p, q = vertices[ends.min(1)], vertices[ends.max(1)]
        edge = (q - p)[triangle]
        side = edge[:, 0] * (y - p[triangle, 1]) - edge[:, 1] * (x - p[triangle, 0])
        inside &= np.where((forward * up)[triangle] > 0, side >= 0, side < 0)
    t, x, y, i, j = (each[inside] for each in (triangle, x, y, i, j))
    slope = np.cross(b - a, c - a)
    z = a[t, 2] - (slope[t, 0] * (x - a[t, 0]) + slope[t, 1] * (y - a[t, 1])) / slope[t, 2]
    low = np.minimum(np.minimum(a[:, 2], b[:, 2]), c[:, 2])[t]
    high = np.maximum(np.maximum(a[:, 2], b[:, 2]), c[:, 2])[t]
    return i * len(ys) + j, np.clip(z, low, high), -up[t].astype(np.int8)
