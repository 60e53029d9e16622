"""Bytes that training keeps of a model: weights, gradients and optimizer state, from shapes alone.

Torch is not imported here, which takes longer than all of this: `optimizers` has the layouts as
numbers, and the tests hold each against the tensors that its class allocates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = Sequence[int]

ROW_LAYOUT_MIN = 64  # elements of a row from which on blocks restart at every row
BUCKET_BYTES = 64 << 20  # `release_gradients` steps when so many bytes of gradients wait
ITEMSIZE = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2,
    # By torch's names, those of weights that are only there frozen, as of a quantized model.
    "complex64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
TORCH_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Weight:
    """A tensor of a model.

    Attributes:
        name: what the model calls it.
        shape: its shape.
        dtype: a key of `ITEMSIZE`.
        embedding: whether it is an embedding's.
        trained: whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    embedding: bool = False
    trained: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of the weight, and as many of its gradient."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Model:
    """A model: shapes and dtypes of its weights.

    Attributes:
        source: where it is from, in a few words.
        weights: its parameters, a shared one once.
        notes: what a reader should know of how it was read.
        config: a Hugging Face configuration, if it is of one.
        build: makes it again, where that is possible.
    """

    source: str
    weights: tuple[Weight, ...]
    notes: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    build: Any = None

    @property
    def parameters(self) -> int:
        """The number of elements in the weights."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def largest(self) -> Weight:
        """The weight with the largest gradient."""
        return max((w for w in self.weights if w.trained), key=lambda weight: weight.bytes)


def blocks(shape: Shape, block: int, by_rows: bool = True) -> int:
    """Blocks of a tensor: restarted at every row of 64 elements or more, or run over all."""
    if by_rows and _has_rows(shape):
        return shape[0] * -(-math.prod(shape[1:]) // block)
    return -(-math.prod(shape) // block)


def _has_rows(shape: Shape) -> bool:
    return len(shape) >= 2 and math.prod(shape[1:]) >= ROW_LAYOUT_MIN


@dataclass(frozen=True)
class Storage:
    """Storage of a tensor's moments.

    Attributes:
        element: bytes for each element, of all moments together.
        scales: bytes for each block, of all moments together.
        block: elements of a block.
        by_rows: whether blocks restart at every row.
    """

    element: int
    scales: int = 0
    block: int = 1
    by_rows: bool = True

    def bytes(self, shape: Shape) -> int:
        """Bytes of a tensor's moments."""
        scales = self.scales * blocks(shape, self.block, self.by_rows) if self.scales else 0
        return math.prod(shape) * self.element + scales


@dataclass(frozen=True)
class Layout:
    """Storage of an optimizer's state of each parameter, in one format.

    Attributes:
        library: the package it is of.
        family: the optimizer, without its bits.
        name: its class.
        format: how its moments are kept.
        moments: how many there are.
        coded: how they are coded; None for numbers.
        exact: how many of them are numbers in any case.
        least_width: least bytes of a number; 0 for those of the parameter's dtype.
        fixed: bytes for each parameter, its count of steps for example.
        tables: bytes for each parameter that is coded, its own code books for example.
        shared: bytes that all parameters that are coded share.
        least, multiple: elements from which on, and in multiples of which, a parameter is coded.
        further: how many numbers there are beside moments, where that depends on the shape.
        bits: of bf16 weights that training goes on with; None where there is no choice.
        residual: bytes for each element of a bf16 weight that are kept beside it.
        overrides: whether single parameters can be given 32 bits.
        bucket_bytes: gradients that wait when they are released; None where they are not.
        whole: whether every rank keeps the whole state of every parameter that is sharded.
        own: whether it is of this package.
        documented: whether its layout is read in its documentation and source, not measured.
    """

    library: str
    family: str
    name: str
    format: str
    moments: int
    coded: Storage | None = None
    exact: int = 0
    least_width: int = 0
    fixed: int = 0
    tables: int = 0
    shared: int = 0
    least: int = 4096
    multiple: int = 1
    further: Callable[[Shape], int] | None = None
    bits: int | None = None
    residual: int = 0
    overrides: bool = False
    bucket_bytes: int | None = None
    whole: bool = False
    own: bool = False
    documented: bool = False

    def codes(self, weight: Weight, shape: Shape, in_32_bits: bool) -> bool:
        """Whether the moments of a parameter, or of its shard of this shape, are coded."""
        numel = math.prod(weight.shape if self.own else shape)
        exempt = in_32_bits and self.overrides and weight.embedding
        return bool(self.coded) and numel >= self.least and not (numel % self.multiple or exempt)

    def state(self, weight: Weight, shape: Shape, coded: bool) -> int:
        """Bytes of a parameter's state, or of that of its shard, without its residual."""
        width = max(self.least_width, ITEMSIZE[weight.dtype])
        number = width * math.prod(shape)
        further = self.fixed + (width * self.further(shape) if self.further else 0)
        if coded and self.coded is not None:
            return self.coded.bytes(shape) + self.tables + self.exact * number + further
        return self.moments * number + further

    def kept_whole(self, weight: Weight, shards: int, coded: bool) -> bool:
        """Whether every rank keeps a parameter's whole state.

        It does where the rule needs whole tensors, and where a shard would end in a coded block.
        """
        if self.whole:
            return True
        if not self.own or shards == 1 or not weight.shape or _has_rows(weight.shape):
            return False
        return coded and self.coded is not None and _cuts(weight.shape, shards, self.coded.block)


def _cuts(shape: Shape, shards: int, block: int) -> bool:
    """Whether a shard of a tensor whose blocks run over all of it may end within one."""
    numel = math.prod(shape)
    if not numel:
        return False
    each, rest = divmod(-(-shape[0] // shards) * (numel // shape[0]), block)
    return bool(rest) or -(-blocks(shape, block, False) // shards) != each


def shard(shape: Shape, shards: int) -> tuple[int, ...]:
    """The largest shard of a tensor that is sharded along its first dimension."""
    return (-(-shape[0] // shards), *shape[1:]) if shape else ()


@dataclass(frozen=True)
class Footprint:
    """Bytes that are there between two steps, at the end of the backward pass.

    Attributes:
        weights: of the model's parameters.
        gradients: of all of them.
        gradients_released: of those that wait when they are released; None where they cannot be.
        state: of the optimizer, without the residuals.
        residual: of the bits that are kept beside bf16 weights.
    """

    weights: int
    gradients: int
    gradients_released: int | None
    state: int
    residual: int

    @property
    def sum(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.state + self.residual

    @property
    def sum_released(self) -> int | None:
        """All of it, with gradients released."""
        if self.gradients_released is None:
            return None
        return self.sum - self.gradients + self.gradients_released


def footprint(
    layout: Layout, weights: Sequence[Weight], shards: int = 1, embeddings_in_32_bits: bool = False
) -> Footprint:
    """Bytes that a rank keeps.

    Args:
        layout: the optimizer.
        weights: the model's tensors; one that several modules share is given once.
        shards: ranks that parameters are sharded over, row by row; of these the fullest.
        embeddings_in_32_bits: of libraries that can give single parameters a width of their own.
    """
    kinds = Counter((w.shape, w.dtype, w.embedding, w.trained) for w in weights)
    all_weights = gradients = state = residual = coded_any = 0
    for (shape, dtype, embedding, trained), count in kinds.items():
        weight = Weight("", shape, dtype, embedding)
        held = shard(shape, shards)
        size = count * ITEMSIZE[dtype] * math.prod(held)
        all_weights += size
        if not trained:
            continue
        gradients += size
        coded = layout.codes(weight, held, embeddings_in_32_bits)
        if layout.kept_whole(weight, shards, coded):
            held = shape
        state += count * layout.state(weight, held, coded)
        coded_any |= coded
        if dtype == "bf16":
            residual += count * layout.residual * math.prod(held)
    return Footprint(
        weights=all_weights,
        gradients=gradients,
        gradients_released=_released(layout, weights, shards),
        state=state + (layout.shared if coded_any else 0),
        residual=residual,
    )


def _released(layout: Layout, weights: Sequence[Weight], shards: int) -> int | None:
    """The most bytes of gradients that wait when they are released, the last weight's first."""
    if layout.bucket_bytes is None:
        return None
    arriving = [w for w in reversed(weights) if w.trained]
    held = (ITEMSIZE[w.dtype] * math.prod(shard(w.shape, shards)) for w in arriving)
    return largest_bucket([w.bytes for w in arriving], layout.bucket_bytes, held)


def largest_bucket(
    gradients: Iterable[int], bucket_bytes: int, held: Iterable[int] | None = None
) -> int:
    """The most bytes of gradients that wait at once, of those that arrive in this order.

    Args:
        gradients: bytes of each.
        bucket_bytes: when so many wait they are stepped; whole ones count, that all ranks agree.
        held: what of each is on this rank; None for all of it.
    """
    whole = list(gradients)
    largest = waiting = here = 0
    for size, part in zip(whole, whole if held is None else held, strict=True):
        waiting, here = waiting + size, here + part
        largest = max(largest, here)
        if waiting >= bucket_bytes:
            waiting = here = 0
    return largest
