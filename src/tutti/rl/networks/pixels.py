"""Networks that see pictures: the convolutions of Mnih et al. (2015), as Stable-Baselines3's `NatureCNN` has them.

Pictures travel as flat uint8 features, channels first, and are scaled by 1/255 where numbers are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 512  # numbers that the convolutions make of a picture
SMALLEST = 36  # pixels of height and width that three convolutions need
Image = tuple[int, int, int]  # channels, height, width


def scaled(x: Tensor) -> Tensor:
    """Pixels, uint8, as numbers in [0, 1]; others as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def fits(image: Image | None) -> bool:
    """Whether a picture is large enough."""
    return image is not None and min(image[1:]) >= SMALLEST


class NatureCNN(nn.Module):
    """Pictures (..., channels x height x width) in [0, 1] to features (..., 512).

    gain: gain of the orthogonal first weights, with biases 0; without it PyTorch's own.
    """

    def __init__(self, image: Image, gain: float | None = None):
        super().__init__()
        self.image, (channels, height, width) = image, image
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
        )  # fmt: skip
        self.linear = nn.Sequential(nn.Linear(64 * height * width, FEATURES), nn.ReLU())
        for name, parameter in self.named_parameters() if gain is not None else ():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.orthogonal_(parameter, gain or 1.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, *self.image)
        return self.linear(self.convolutions(rows).flatten(1)).reshape(*x.shape[:-1], FEATURES)


class Seeing(nn.Module):
    """A network behind convolutions: it gets the features of a picture, and what follows the picture as it is."""

    def __init__(self, image: Image, after: Callable[[int], nn.Module], size: int):
        super().__init__()
        self.eyes, self.pixels = NatureCNN(image), image[0] * image[1] * image[2]
        self.after = after(size - self.pixels + FEATURES)

    def forward(self, x: Tensor, *more: Any) -> Any:
        seen = self.eyes(x[..., : self.pixels])
        return self.after(torch.cat([seen, x[..., self.pixels :]], -1), *more)
