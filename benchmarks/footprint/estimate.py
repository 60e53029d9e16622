"""Expected bytes of a training, by the arithmetic of `lowbit-optim estimate`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.common import registry
from lowbit_optim_cli import footprint, optimizers

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# Options of a row on which the layout depends, of which the arithmetic knows the default alone.
_UNKNOWN = ("max_size",)


def layout(source: registry.Source, bf16: bool, bits: int | None) -> footprint.Layout | None:
    """The layout of an optimizer's state; None for one that has no arithmetic.

    Args:
        source: the optimizer.
        bf16: whether the weights are.
        bits: `master_weight_bits`, None for the optimizer's default.
    """
    if any(name in source.options for name in _UNKNOWN):
        return None
    of_class = [
        one
        for one in optimizers.layouts(bf16)
        if (one.library, one.name) == (source.library, source.cls) and bits in (None, one.bits)
    ]
    # Of two formats with the same bits the first is the default, and so are the fewest weight bits.
    format = source.options.get("state_format", of_class[0].format if of_class else None)
    return next((one for one in of_class if one.format == format), None)


def state_bytes(
    source: registry.Source, params: Sequence[torch.nn.Parameter], bits: int | None
) -> int | None:
    """Bytes of an optimizer's state, with what is kept beside bf16 weights; None if not known."""
    found = layout(source, params[0].dtype == torch.bfloat16, bits)
    if found is None:
        return None
    weights = [footprint.Weight("", tuple(p.shape), _DTYPES[p.dtype]) for p in params]
    kept = footprint.footprint(found, weights)
    return kept.state + kept.residual


def released_bytes(params: Sequence[torch.nn.Parameter], bucket_bytes: int) -> int:
    """Bytes of the released gradients that wait at once, those of the last parameters the first."""
    return footprint.largest_bucket((p.nbytes for p in reversed(params)), bucket_bytes)
