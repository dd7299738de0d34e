"""Pictures: areas of what is drawn, and pictures of environments that show their state."""

import math

import numpy as np
import pytest
import torch

from tutti.rl.core import keys
from tutti.rl.envs import registry
from tutti.rl.envs.canvas import BLACK, RED, WHITE, Canvas, tiles


def test_shapes_cover_their_areas():
    for draw, area in (
        (lambda c: c.disk(0.1, 0.2, 0.5, BLACK), math.pi / 4),
        (lambda c: c.ring(0, 0, 0.5, 0.1, BLACK), math.pi * (0.55**2 - 0.45**2)),
        (lambda c: c.line((-0.5, -0.5), (0.5, 0.5), 0.2, BLACK), 0.2 * math.sqrt(2) + math.pi * 0.01),
        (lambda c: c.box(0, 0.3, 0.8, 0.5, BLACK), 0.4),
        (lambda c: c.disk(0, 0, 0.5, BLACK, opacity=0.5), math.pi / 8),
    ):
        canvas = Canvas(-1, -1, 1, 1, 200)
        draw(canvas)
        dark = 1 - canvas.pixels[..., 0] / 255
        assert dark.sum() / 200**2 * 4 == pytest.approx(area, rel=0.01)


def test_up_is_up_and_right_is_right():
    canvas = Canvas(0, 0, 4, 2, 40)
    canvas.disk(3.5, 1.5, 0.2, RED)
    picture = canvas.picture()
    assert picture.shape == (20, 40, 3)
    assert picture.dtype == np.uint8
    assert tuple(picture[5, 35]) == RED
    assert tuple(picture[15, 5]) == WHITE


def test_tiles_show_the_first_plane():
    planes = np.zeros((2, 2, 3))
    planes[0, 0, 1] = planes[1, 0, 1] = planes[1, 1, 2] = 1
    picture = tiles(planes, [RED, WHITE], size=5)
    assert picture.shape == (10, 15, 3)
    assert tuple(picture[2, 7]) == RED
    assert tuple(picture[7, 12]) == WHITE


DRAWN = [name for name in registry.names() if name not in ("LQR", "Catch", "DeepSea", "TMaze")]


@pytest.mark.parametrize("name", DRAWN)
def test_environments_draw_what_changes(name):
    env = registry.make(name)
    state, _ = env.reset(keys.make(0), 2)
    picture = env.draw(state, 1)
    assert picture is not None
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert (picture != picture[0, 0]).any()
    if name in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0"):
        other = env.draw({**state, "x": state["x"] + torch.tensor(0.3)}, 1)
    elif "position" in state:
        other = env.draw({**state, "position": state["position"] * 0.9}, 1)
    else:
        return
    assert (picture != other).any()
