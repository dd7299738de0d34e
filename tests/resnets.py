"""Residual networks in the form of torchvision's, small enough for tests and benchmarks on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3."""

    grows = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, which has twice as many channels."""

    grows = 2

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, width * self.grows, 1), nn.BatchNorm2d(width * self.grows)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * self.grows, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """depths: blocks of each stage, each of which halves height and width but the first, and doubles the channels."""

    def __init__(self, block: type, depths: Sequence[int], width: int, classes: int, channels: int = 3,
                 pool: bool = False):  # fmt: skip
        super().__init__()
        self.conv1, self.bn1, self.relu = conv(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 1, 1) if pool else nn.Identity()
        inputs = width
        self.stages = []
        for i, depth in enumerate(depths):
            blocks = []
            for j in range(depth):
                blocks.append(block(inputs, width << i, 2 if i and not j else 1))
                inputs = (width << i) * block.grows
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
            self.stages.append(f"layer{i + 1}")
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(torch.flatten(x.mean((2, 3)), 1))
