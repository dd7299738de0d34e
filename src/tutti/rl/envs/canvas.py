"""Pictures without a graphics library: smooth disks, lines and tiles on an array of pixels."""

from __future__ import annotations

import numpy as np

Color = tuple[int, int, int]
WHITE, BLACK, GRAY = (255, 255, 255), (0, 0, 0), (150, 150, 150)
RED, GREEN, BLUE, ORANGE = (200, 60, 60), (60, 150, 70), (60, 100, 190), (225, 150, 40)


class Canvas:
    """A picture of the plane from (left, bottom) to (right, top). Sizes and positions are in units of the plane."""

    def __init__(self, left: float, bottom: float, right: float, top: float, width: int = 300, color: Color = WHITE):
        """width: pixels. The height follows from it."""
        self.scale = width / (right - left)
        height = max(1, round((top - bottom) * self.scale))
        self.pixels = np.broadcast_to(np.array(color, np.float32), (height, width, 3)).copy()
        self.x = left + (np.arange(width) + 0.5) / self.scale
        self.y = (top - (np.arange(height) + 0.5) / self.scale)[:, None]

    def disk(self, x: float, y: float, radius: float, color: Color, opacity: float = 1.0) -> None:
        near = self.near(x - radius, y - radius, x + radius, y + radius)
        self.fill(np.hypot(self.x[near[1]] - x, self.y[near[0]] - y) - radius, color, opacity, near)

    def ring(self, x: float, y: float, radius: float, width: float, color: Color) -> None:
        far = radius + width / 2
        near = self.near(x - far, y - far, x + far, y + far)
        self.fill(abs(np.hypot(self.x[near[1]] - x, self.y[near[0]] - y) - radius) - width / 2, color, 1.0, near)

    def line(self, start: tuple[float, float], end: tuple[float, float], width: float, color: Color) -> None:
        """With round ends."""
        (x0, y0), (x1, y1), half = start, end, width / 2
        near = self.near(min(x0, x1) - half, min(y0, y1) - half, max(x0, x1) + half, max(y0, y1) + half)
        x, y, dx, dy = self.x[near[1]] - x0, self.y[near[0]] - y0, x1 - x0, y1 - y0
        along = ((x * dx + y * dy) / max(dx * dx + dy * dy, 1e-12)).clip(0, 1)
        self.fill(np.hypot(x - along * dx, y - along * dy) - half, color, 1.0, near)

    def box(self, x: float, y: float, width: float, height: float, color: Color) -> None:
        """x, y: the middle."""
        self.fill(np.maximum(abs(self.x - x) - width / 2, abs(self.y - y) - height / 2), color)

    def near(self, left: float, bottom: float, right: float, top: float) -> tuple[slice, slice]:
        """The pixels of a part of the plane, and those around it: rows, columns."""
        rows = np.searchsorted(-self.y[:, 0], [-top - 1 / self.scale, 1 / self.scale - bottom])
        columns = np.searchsorted(self.x, [left - 1 / self.scale, right + 1 / self.scale])
        return slice(*rows), slice(*columns)

    def fill(self, distance: np.ndarray, color: Color, opacity: float = 1.0, near=(slice(None), slice(None))) -> None:
        """Fill the area where the signed distance from a border is negative. Pixels on the border are covered in part.

        near: the rows and columns that distances are given for.
        """
        cover = (opacity * (0.5 - distance * self.scale).clip(0, 1))[..., None].astype(np.float32)
        self.pixels[near] += cover * (np.array(color, np.float32) - self.pixels[near])

    def picture(self) -> np.ndarray:
        """uint8 (height, width, 3)."""
        return self.pixels.round().clip(0, 255).astype(np.uint8)


def tiles(planes: np.ndarray, colors: list[Color], size: int = 24, empty: Color = (25, 25, 30)) -> np.ndarray:
    """A picture of a board, uint8. planes: (planes, rows, columns); a cell has the color of its first plane above 0."""
    picture = np.broadcast_to(np.array(empty, np.uint8), (*planes.shape[1:], 3)).copy()
    for plane, color in reversed(list(zip(planes, colors, strict=True))):
        picture[plane > 0] = color
    picture = picture.repeat(size, 0).repeat(size, 1)
    picture[::size] = picture[:, ::size] = (60, 60, 65)
    return picture
