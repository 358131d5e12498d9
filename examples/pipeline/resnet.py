"""A small residual network, with the modules and the forward that torchvision's large ones have."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions with batch norm, and a way around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 2 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """Map x of (batch, channels, side, side) to (batch, 2 width, side / stride, side / stride)."""
        around = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += around
        return self.relu(x)


class ResNet(nn.Module):
    """Logits (batch, kinds) of pictures (batch, 3, side, side), by four runs of so many blocks."""

    def __init__(self, width: int = 4, blocks: tuple[int, ...] = (1, 1, 2, 1), kinds: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 1, padding=1)
        self.layer1 = self._layer(width, width, blocks[0], 1)
        self.layer2 = self._layer(2 * width, width, blocks[1], 2)
        self.layer3 = self._layer(2 * width, 2 * width, blocks[2], 2)
        self.layer4 = self._layer(4 * width, 4 * width, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, kinds)

    @staticmethod
    def _layer(channels: int, width: int, count: int, stride: int) -> nn.Sequential:
        more = (Bottleneck(2 * width, width, 1) for _ in range(count - 1))
        return nn.Sequential(Bottleneck(channels, width, stride), *more)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))
