"""Shapes of models' parameters, as their libraries build them, without the libraries."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.shapes import SHAPES, Shape


def _vit(width: int = 768, layers: int = 12) -> Iterator[Shape]:
    """ViT-B/16 at 224 pixels (Dosovitskiy et al., arXiv:2010.11929), as torchvision has it."""
    yield from ((1, 1, width), (width, 3, 16, 16), (width,), (1, 197, width))
    for _ in range(layers):
        yield from ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width))
        yield (width,)
    yield from ((width,), (width,), (1000, width), (1000,))


def _llama(
    vocabulary: int, width: int, layers: int, inner: int, keys: int, tied: bool
) -> Iterator[Shape]:
    """A Llama (Touvron et al., arXiv:2302.13971) with grouped keys, as transformers has it."""
    yield (vocabulary, width)
    for _ in range(layers):
        yield from ((width, width), (keys, width), (keys, width), (width, width))
        yield from ((inner, width), (inner, width), (width, inner), (width,), (width,))
    yield (width,)
    if not tied:
        yield (vocabulary, width)


MODELS: dict[str, tuple[Shape, ...]] = {
    "ResNet-50": SHAPES["resnet50"],
    "ViT-B": tuple(_vit()),
    "GPT-2 small": SHAPES["gpt2"],
    "Llama 1B": tuple(_llama(128256, 2048, 16, 8192, 512, tied=True)),
    "Llama 8B": tuple(_llama(128256, 4096, 32, 14336, 1024, tied=False)),
}
