"""What a step should take, by shapes alone, which stands beside what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from benchmarks.common import arithmetic, registry

_FORMATS = {"32": "float32", "8": "dynamic8", "4": "ratio4"}


def state_bytes(
    source: registry.Source, params: Iterable[torch.nn.Parameter], bits: int | None
) -> int | None:
    """Bytes of the state of this package's Adam and AdamW; None for what has no arithmetic.

    Args:
        source: of the optimizer.
        params: its parameters.
        bits: `master_weight_bits`.
    """
    ours = re.fullmatch(r"lowbit_optim\.AdamW?(4|8|32)bit", f"{source.module}.{source.cls}")
    if ours is None:
        return None
    format = str(source.options.get("state_format", _FORMATS[ours[1]]))
    return sum(arithmetic.state_bytes(p.shape, format, bits) for p in params)


def gradient_bytes(params: Iterable[torch.nn.Parameter], released: bool, bucket_bytes: int) -> int:
    """Bytes of the gradients that are there at once, those of the last parameters the first."""
    sizes = [p.nbytes for p in params]
    return arithmetic.largest_bucket(reversed(sizes), bucket_bytes) if released else sum(sizes)
