"""Observations as vectors, against gymnasium's own flattening."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils import _pytree as pytree

from tutti.rl.networks.features import features_of

SPACES = [
    spaces.Box(-1, 1, (2, 3)),
    spaces.Discrete(4),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(5),
    spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(0, 1, (2,))}),
    spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": spaces.MultiBinary(2)})]),
]


@pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__)
def test_are_those_of_gymnasium(space):
    space.seed(0)
    samples = [space.sample() for _ in range(3)]
    wanted = np.stack([spaces.flatten(space, x) for x in samples]).astype(np.float32)
    plain = [_plain(x) for x in samples]
    batch = pytree.tree_map(lambda *x: torch.stack([torch.as_tensor(y) for y in x]), *plain)
    features = features_of(space)
    assert features.size == wanted.shape[1]
    np.testing.assert_allclose(features(batch).numpy(), wanted)


def _plain(x):
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return {str(i): _plain(v) for i, v in enumerate(x)} if isinstance(x, tuple) else x


def test_pixels_become_planes_of_numbers_up_to_1():
    features = features_of(spaces.Box(0, 255, (4, 6, 3), np.uint8))
    picture = torch.randint(256, (2, 4, 6, 3), dtype=torch.uint8)
    assert features.image == (3, 4, 6) and features.size == 72
    torch.testing.assert_close(features(picture).view(2, 3, 4, 6), picture.permute(0, 3, 1, 2).float() / 255)


def test_start_of_a_discrete_space():
    assert features_of(spaces.Discrete(3, start=5))(torch.tensor([6])).tolist() == [[0, 1, 0]]


def test_spaces_without_a_size():
    with pytest.raises(ValueError, match=r"no fixed size; wrap the environment"):
        features_of(spaces.Sequence(spaces.Discrete(2)))
