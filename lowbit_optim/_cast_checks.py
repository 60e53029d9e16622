"""Saved moments that torch.distributed.checkpoint has cast or mixed up, which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.formats import FORMATS, OF_BITS, Format, Unit, constant, units
from lowbit_optim_kernels.weights import RESIDUAL_KEY, WEIGHTS, as_integers

from . import _sharding
from ._saved_moments import Moments, formats_of
from ._tensor_checks import REAL

_CAST = (
    "torch.distributed.checkpoint casts what it reads to the dtypes of this optimizer. Build one "
    "with the settings that were saved, read the checkpoint into that, and give its state_dict() "
    "to this one"
)

_LOAD_WHOLE = (
    "torch.distributed.checkpoint casts it between plain tensors and DTensors. Load a whole state "
    "dict, see docs/bf16_weights.md; without this entry a weight goes on from its bf16 number"
)

_LOAD_AS_SAVED = (
    "torch.distributed.checkpoint puts a whole state dict into the state of this optimizer, and "
    "casts it with broadcast_from_rank0. Give it to load_state_dict() on every rank instead, see "
    "docs/guides/sharded.md"
)


# Numbers that have to look cast, all of those there are: one in 29 does by chance.
LEAST_CAST = 8


def require_coded(saved: Mapping[str, Any], p: Tensor, unit: Unit) -> None:
    """Refuse codes of other numbers than 0 where all scales are 0, which no step leaves behind.

    They are numbers that were cast into the state that torch makes in a new optimizer. In that of
    an fp64 parameter scales come to 0 before its numbers do.
    """
    if p.dtype == torch.float64 or p.device.type == "meta":
        return
    if any(bool(saved[part.key].any()) for part in unit.parts if part.per_block):
        return
    for part, zero in zip(unit.parts, constant(unit, 0.0), strict=True):
        if not part.per_block and bool((saved[part.key] != zero).any()):
            raise ValueError(
                f"{part.key!r} has codes of {unit.format.name!r} and all of its scales are 0, "
                f"which no step leaves behind: they were cast on the way; {_LOAD_AS_SAVED}"
            )


def without_own(
    saved: Mapping[str, Any], moments: Moments, group: Mapping[str, Any], own: Format
) -> dict[str, Any]:
    """Saved state without the tensors in which the optimizer that loads it keeps these moments.

    Of a whole state dict torch.distributed.checkpoint puts the keys beside those of the state that
    it has made in the optimizer at hand. Two formats are there then, one of them with the file's
    numbers: the one that the file's group names.

    Args:
        saved: a parameter's saved state.
        moments: those of the optimizer that loads it.
        group: the parameter's group in the same state dict.
        own: the format of the parameter in that optimizer.

    Raises:
        ValueError: if that group names none of the formats that are there, or this optimizer's.
    """
    coded = tuple(moment for moment in moments if not moment.exact)
    complete = formats_of(saved, coded).items() if coded else ()
    there = {format: keys for format, keys in complete if not format.exact}
    if len(there) < 2:
        return dict(saved)
    named = _named_by(group)
    kept = None if named is None or named is own else there.get(named.for_moments(coded))
    if kept is None:
        names = " and ".join(repr(format.name) for format in there)
        raise ValueError(
            f"it has tensors of {names}, and its group in state_dict, which says "
            f"{named and named.name!r}, does not tell which were saved (this optimizer has "
            f"{own.name!r}); {_LOAD_AS_SAVED}"
        )
    others = {key for keys in there.values() for key in keys} - kept
    return {key: value for key, value in saved.items() if key not in others}


def _named_by(group: Mapping[str, Any]) -> Format | None:
    """The format that a saved group says; None where it says nothing, or nothing that is known."""
    name = group.get("state_format")
    if name is None:
        name = OF_BITS.get(group.get("optim_bits", 0))
    return FORMATS.get(name) if isinstance(name, str) else None


def require_uncast(
    saved: Mapping[str, Any], p: Tensor, moments: Moments, group: Mapping[str, Any],
    residual_dtype: torch.dtype | None, format: Format | None,
) -> None:  # fmt: skip
    """Refuse codes that have been cast to numbers, or the reverse: nothing makes moments of these.

    torch.distributed.checkpoint reads into the tensors of the optimizer at hand and casts what it
    finds in the file to their dtypes, without a word. What a group was saved with comes as it was:

        saved as           cast to       is known by
        8- or 4-bit codes  numbers       a group of coded moments, all of whose numbers are whole
        32-bit numbers     codes         a group of 32 bits, with DTensors of codes and equal scales
        a residual         other widths  another dtype than the group's master_weight_bits mean
        one of 16 bits     bf16, or the  all of its numbers being whole, or having few bits
                           reverse

    All moments of a parameter are cast or none, so those that an override keeps in 32 bits pass if
    one of them has a number that is not whole. Numbers become codes by `broadcast_from_rank0` only,
    and so in DTensors, of the format at hand; others may be of a group whose bits were changed.

    Args:
        saved: a parameter's saved state; of DTensors this rank's shards are looked at.
        p: the parameter.
        moments: those of the optimizer that loads it.
        group: the parameter's group in the same state dict.
        residual_dtype: of residuals of the optimizer that loads it, which they would be cast to;
            None where an override decides it, as it may have when the state was saved.
        format: of the parameter in that optimizer; None where an override decides it, likewise.
    """
    named, least = _named_by(group), group.get("min_8bit_size", 0)
    small = isinstance(least, Real) and not p.numel() >= least
    if named is not None and (named.exact or small):
        if format is not None:
            _require_no_codes(saved, moments, format)
    elif named is not None and isinstance(least, Real):
        found = {m.key: _sharding.local(saved.get(m.key)) for m in moments if not m.exact}
        there = {key: x for key, x in found.items() if isinstance(x, Tensor)}
        if all(map(_may_be_codes, there.values())) and any(bool(x.any()) for x in there.values()):
            key = next(iter(there))
            raise ValueError(f"{key!r} has codes of {named.name!r} as numbers; {_CAST}")
    residual, bits = saved.get(RESIDUAL_KEY), group.get("master_weight_bits")
    if not isinstance(residual, Tensor) or p.dtype != torch.bfloat16 or bits not in WEIGHTS:
        return
    wanted, got = WEIGHTS[bits].residual, as_integers(_sharding.local(residual)).dtype
    if wanted not in (None, got) and got == residual_dtype:
        raise ValueError(
            f"{RESIDUAL_KEY!r} is {got} and was saved with master_weight_bits={bits}, which is "
            f"{wanted}; {_CAST}"
        )
    if wanted == got == residual_dtype == torch.int16:
        _require_own_bits(_sharding.local(residual))


def _require_own_bits(residual: Tensor) -> None:
    """Refuse a residual of 16 bits whose numbers have been cast, not its bits.

    DTensors have bf16 numbers of the same bits as the integers of plain tensors. Integers that were
    cast to bf16 are whole there, and bf16 numbers that were cast to integers have at most 8
    significant bits. Residuals whose last 8 bits are 0 say nothing: they were begun in 24 bits, or
    are of weights that were fp16.
    """
    if residual.device.type == "meta":
        return
    bits, wide = as_integers(residual), residual.float()
    if residual.dtype == torch.bfloat16:
        cast = (wide == wide.round()) & (wide.abs() <= 2**15)
    else:  # 32767 is what some devices make of greater numbers
        cast = (wide == residual.bfloat16().float()) | (bits == 2**15 - 1)
    telling = bits & 255 != 0
    if int(telling.sum()) >= LEAST_CAST and bool(cast[telling].all()):
        raise ValueError(
            f"{RESIDUAL_KEY!r} of shape {tuple(residual.shape)} has numbers that were cast from "
            f"{'integers to bf16' if residual.dtype == torch.bfloat16 else 'bf16 to integers'}; "
            f"{_LOAD_WHOLE}"
        )


def _require_no_codes(saved: Mapping[str, Any], moments: Moments, format: Format) -> None:
    """Refuse codes of a format in DTensors, of a parameter that was saved with 32 bits."""
    coded = [unit for unit in units(moments, format) if not unit.format.exact]
    codes = {part.key: part.dtype for unit in coded for part in unit.parts if not part.per_block}
    found: dict[str, Any] = {key: saved.get(key) for key in codes}
    cast = all(_sharding.is_dtensor(x) and x.dtype == codes[k] for k, x in found.items())
    scales = [
        _sharding.local(saved.get(x.key)) for unit in coded for x in unit.parts if x.per_block
    ]
    # Those of a new state are alike. Others are of codes whose group was changed before a save.
    new = all(isinstance(x, Tensor) and bool((x == x.flatten()[:1]).all()) for x in scales)
    if codes and cast and new:
        raise ValueError(
            f"{next(iter(codes))!r} has codes of {coded[0].format.name!r} and was saved with 32 "
            f"bits; {_LOAD_AS_SAVED}"
        )


def _may_be_codes(value: Tensor) -> bool:
    """Whether a moment's numbers are all whole, as those of codes are."""
    if value.dtype not in REAL or value.layout != torch.strided or value.device.type == "meta":
        return False  # its checks say what they think of it
    whole = (value == value.round()) & (value >= 0) & (value <= 255)
    return bool(whole.all())
