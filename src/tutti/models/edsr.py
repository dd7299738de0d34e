"""EDSR: super-resolution by residual blocks without batch norm (Lim et al. 2017, arXiv:1707.02921).

from tutti.models.edsr import EDSRConfig, EDSRForSuperResolution

model = EDSRForSuperResolution(EDSRConfig(scale=2))
model(pixel_values=torch.rand(1, 3, 24, 24)).reconstruction  # (1, 3, 48, 48)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageSuperResolutionOutput


class EDSRConfig(PreTrainedConfig):
    """Sizes of an EDSR model: by default the baseline. The large model has 32 blocks of 256 features, scaled by 0.1.

    scale: 2, 3 or 4, how many times as high and as wide the output is.
    residual_scale: factor of what a block adds, which stabilizes wide models.
    mean: mean of each channel, subtracted from the input and added to the output.
    """

    model_type = "edsr"

    num_channels: int = 3
    num_blocks: int = 16
    features: int = 64
    scale: int = 2
    residual_scale: float = 1.0
    mean: tuple[float, ...] | list[float] = (0.4488, 0.4371, 0.4040)

    def __post_init__(self, **kwargs: Any):
        if self.scale not in (2, 3, 4):
            raise ValueError(f"the scale is {self.scale}; it must be 2, 3 or 4")
        if len(self.mean) != self.num_channels:
            raise ValueError(f"mean has {len(self.mean)} values for {self.num_channels} channels")
        super().__post_init__(**kwargs)


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    """A 3 x 3 convolution that keeps height and width."""
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class ResidualBlock(nn.Module):
    """Convolution, ReLU, convolution, and the input added."""

    def __init__(self, features: int, scale: float):
        super().__init__()
        self.first, self.second, self.scale = conv(features, features), conv(features, features), scale

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features, height, width) -> the same shape."""
        return x + self.second(torch.relu(self.first(x))) * self.scale


class Upsampler(nn.Sequential):
    """Sub-pixel convolutions (Shi et al. 2016): one for a scale of 2 or 3, two for 4."""

    def __init__(self, features: int, scale: int):
        steps = (2, 2) if scale == 4 else (scale,)
        super().__init__(*(m for s in steps for m in (conv(features, s * s * features), nn.PixelShuffle(s))))


@dataclass
class EDSROutput(ImageSuperResolutionOutput):
    """loss: 0-d, if there are labels. reconstruction: (batch, channels, scale x height, scale x width)."""


class EDSRForSuperResolution(PreTrainedModel):
    """EDSR. Pixels are in [0, 1]; the loss is the mean absolute error."""

    config_class = EDSRConfig
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False

    def __init__(self, config: EDSRConfig):
        super().__init__(config)
        features = config.features
        self.head = conv(config.num_channels, features)
        self.body = nn.Sequential(
            *(ResidualBlock(features, config.residual_scale) for _ in range(config.num_blocks)),
            conv(features, features),
        )
        self.upsampler = Upsampler(features, config.scale)
        self.tail = conv(features, config.num_channels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights keep PyTorch's initial values, as in the published code."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> EDSROutput:
        """pixel_values: (batch, channels, height, width). labels: the larger images."""
        mean = pixel_values.new_tensor(list(self.config.mean)).view(1, -1, 1, 1)
        x = self.head(pixel_values - mean)
        image = self.tail(self.upsampler(x + self.body(x))) + mean
        loss = None if labels is None else nn.functional.l1_loss(image, labels)
        return EDSROutput(loss=loss, reconstruction=image)  # pyright: ignore


def psnr(image: Tensor, target: Tensor, border: int = 0) -> Tensor:
    """Peak signal-to-noise ratio in dB of images in [0, 1], (batch,). border: pixels that are left out at each edge."""
    if border:
        image, target = (x[..., border:-border, border:-border] for x in (image, target))
    return -10 * (image.clamp(0, 1) - target).square().mean((1, 2, 3)).log10()


AutoConfig.register("edsr", EDSRConfig)
