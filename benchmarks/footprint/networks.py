"""The networks whose training is weighed: each in three sizes, with what one batch of it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.common import models

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Network:
    """A network of one size and the inputs of a batch.

    Attributes:
        make: the network, in torch's default dtype and on its default device.
        batch: `(dtype, device) -> inputs, targets`.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.dtype, torch.device], tuple[Tensor, Tensor]]

    def build(self, dtype: torch.dtype, device: torch.device = CPU) -> nn.Module:
        """The network with weights that have never been anything but this dtype."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return self.make()
        finally:
            torch.set_default_dtype(before)


def _text(vocabulary: int, length: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """One sequence whose tokens count upwards, each the target of the one before."""

    def batch(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(length + 1, device=device)[None] % vocabulary
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def _images(classes: int, size: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Two images of noise, one of the first and one of the last class."""

    def batch(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, 3, size, size, generator=generator)
        return images.to(device, dtype), torch.tensor([0, classes - 1], device=device)

    return batch


def _gpt2(length: int, **shape: int) -> Network:
    return Network(lambda: models.GPT2(**shape), _text(shape.get("vocabulary", 50257), length))


def _perceptron(width: int, layers: int) -> Network:
    """A network that is next to nothing but matrices, none of them shared."""

    def make() -> nn.Module:
        middle = (layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU()))
        ends = nn.Linear(3 * 16 * 16, width), nn.Linear(width, 10)
        return nn.Sequential(nn.Flatten(), ends[0], nn.ReLU(), *middle, ends[1])

    return Network(make, _images(10, 16))


# Few tokens and small images, so that activations are small beside weights.
NETWORKS: dict[str, dict[str, Network]] = {
    "gpt2": {
        "tiny": _gpt2(8, vocabulary=256, positions=16, width=64, layers=1, heads=2),
        "small": _gpt2(16, vocabulary=8192, positions=256, width=384, layers=6, heads=6),
        "full": _gpt2(16),
    },
    "resnet50": {
        "tiny": Network(lambda: models.ResNet((1, 1, 1, 1), 8, 10), _images(10, 64)),
        "small": Network(lambda: models.ResNet(width=32, classes=100), _images(100, 64)),
        "full": Network(models.ResNet, _images(1000, 64)),
    },
    "perceptron": {
        "tiny": _perceptron(64, 2),
        "small": _perceptron(512, 8),
        "full": _perceptron(2048, 24),
    },
}
