"""The networks that the benchmarks train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


def arithmetic(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model with weights of this dtype is best computed in: mostly in that.

    On a CPU without instructions for bf16 torch takes 35 times as long as in fp32.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return dtype
    backend = torch.backends.mkldnn.is_available()
    return dtype if backend and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def loss(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    arithmetic: torch.dtype | None = None,
) -> torch.Tensor:
    """Mean cross-entropy in nats, of logits in fp32.

    Weights of another dtype than `arithmetic`, if that is given, are cast to it; gradients have
    their own.
    """
    cast = {
        name: p.to(arithmetic)
        for name, p in model.named_parameters()
        if arithmetic not in (None, p.dtype)
    }
    logits = functional_call(model, cast, inputs) if cast else model(inputs)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, expansion: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):
    """Decoder-only transformer over bytes; the defaults have 2.0 M parameters.

    Two wide layers, few positions and embeddings of standard deviation 0.5: of the shapes and
    scales tried, what reached the fewest bits per byte in the seconds that a run has.
    """

    def __init__(
        self, context: int, width: int = 256, layers: int = 2, heads: int = 8, expansion: int = 5
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, expansion) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        with torch.no_grad():
            for block in self.blocks:
                block.out.weight.mul_((2 * layers) ** -0.5)
                block.down.weight.mul_((2 * layers) ** -0.5)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019), its output layer tied; by default the small one.

    That has 124,439,808 parameters, of the released model's shapes but for the order of a matrix's
    dimensions.
    """

    def __init__(
        self,
        vocabulary: int = 50257,
        positions: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads, 4, bias=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


def _convolution(wide: int, width: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution that keeps the image's size but for the stride, and its normalization."""
    convolution = nn.Conv2d(wide, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class Bottleneck(nn.Module):
    """Residual block of three convolutions, with a projection where the shape changes."""

    def __init__(self, wide: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(wide, width, 1), nn.ReLU(), _convolution(width, width, 3, stride),
            nn.ReLU(), _convolution(width, 4 * width, 1),
        )  # fmt: skip
        same = stride == 1 and wide == 4 * width
        self.skip = nn.Identity() if same else _convolution(wide, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.skip(x) + self.body(x))


class ResNet(nn.Module):
    """ResNet (He et al., arXiv:1512.03385); the defaults are ResNet-50, 25,557,032 parameters."""

    def __init__(
        self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        layers = [_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        wide = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(wide, width << stage, stride))
                wide = 4 * (width << stage)
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(wide, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


def _he_init(model: nn.Sequential) -> nn.Module:
    """He initialisation, half as wide in the last layer; biases keep torch's uniform draw.

    Biases are not zero, because both forms of LARS scale a step by the norm of what it changes.
    """
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    with torch.no_grad():
        model[-1].weight.mul_(0.5)
    return model


def small_cnn() -> nn.Module:
    """Two strided convolutions and two linear layers for 28 x 28 images, 0.2 M parameters."""
    return _he_init(
        nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    )


def digits_mlp() -> nn.Module:
    """Two hidden layers of 256 for 8 x 8 images, 0.09 M parameters."""
    return _he_init(
        nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
    )
