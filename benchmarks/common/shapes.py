"""Lists of parameter shapes that `speed` steps: real networks, and one size cut in two ways."""

from __future__ import annotations

import math
from collections.abc import Iterator

Shape = tuple[int, ...]


def _resnet50() -> Iterator[Shape]:
    """ResNet-50 (He et al., arXiv:1512.03385) as torchvision builds it."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    wide = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, wide, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, wide, 1, 1))
            for shape in convolutions:
                yield from (shape, (shape[0],), (shape[0],))
            wide = 4 * width
    yield from ((1000, 2048), (1000,))


def _gpt2() -> Iterator[Shape]:
    """GPT-2 small with its output layer tied, weights (in, out) as in the released model."""
    width = 768
    yield from ((50257, width), (1024, width))
    for _ in range(12):
        yield from ((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width))
        yield (width,)
    yield from ((width,), (width,))


_LLAMA_WIDTH, _LLAMA_WORDS, _LLAMA_LAYERS = 4096, 128256, 32
_LLAMA_MATRICES = (  # of a layer: q, k, v and o; gate, up and down
    (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096),
    (14336, 4096), (14336, 4096), (4096, 14336),
)  # fmt: skip


def _llama() -> Iterator[Shape]:
    """Llama-3.1-8B (arXiv:2407.21783) as transformers builds it."""
    yield (_LLAMA_WORDS, _LLAMA_WIDTH)
    for _ in range(_LLAMA_LAYERS):
        yield from (*_LLAMA_MATRICES, (_LLAMA_WIDTH,), (_LLAMA_WIDTH,))
    yield from ((_LLAMA_WIDTH,), (_LLAMA_WORDS, _LLAMA_WIDTH))


def _lora(rank: int) -> Iterator[Shape]:
    """LoRA (arXiv:2106.09685) on every matrix of its layers, as peft builds it."""
    for outputs, inputs in _LLAMA_MATRICES * _LLAMA_LAYERS:
        yield from ((rank, inputs), (outputs, rank))


SHAPES: dict[str, tuple[Shape, ...]] = {
    "one": ((4096, 4096),),
    "split64": ((512, 512),) * 64,
    "resnet50": tuple(_resnet50()),
    "gpt2": tuple(_gpt2()),
    "small1000": ((64,),) * 1000,
}
GPU_SHAPES: dict[str, tuple[Shape, ...]] = {
    "one-1B": ((10**9,),),
    "resnet50": SHAPES["resnet50"],
    "gpt2": SHAPES["gpt2"],
    "llama-3.1-8B": tuple(_llama()),
    "lora-16": tuple(_lora(16)),
}


def elements(shapes: tuple[Shape, ...]) -> int:
    """Number of parameters in a list of shapes."""
    return sum(math.prod(shape) for shape in shapes)
