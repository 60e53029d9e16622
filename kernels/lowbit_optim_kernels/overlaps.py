"""Which parameters share memory, and so are stepped one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

Memory = tuple[int, int]  # the addresses at which a tensor's elements begin and end


def memory_of(x: Tensor) -> Memory:
    """The addresses at which a tensor's elements begin and end; both 0 if there are none."""
    start = x.data_ptr()
    if not (start and x.numel()):
        return 0, 0
    if x.is_contiguous():  # as nearly all are, and the sum below takes a microsecond
        return start, start + x.nbytes
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def overlaps(memories: Sequence[Memory]) -> Iterator[tuple[int, int]]:
    """The places, the lower first, of every two memories that overlap."""
    each = ((*memory, i) for i, memory in enumerate(memories))
    spans = sorted(span for span in each if span[0] < span[1])
    for k, (_, end, i) in enumerate(spans):
        for m in range(k + 1, len(spans)):
            start, _, j = spans[m]
            if start >= end:
                break
            yield min(i, j), max(i, j)


def turns_of(memories: Sequence[Memory]) -> list[int]:
    """For each memory how many before it, one after the other, overlap."""
    turns = [0] * len(memories)
    for i, j in sorted(overlaps(memories), key=lambda pair: pair[1]):
        turns[j] = max(turns[j], 1 + turns[i])
    return turns
