"""Moments of a checkpoint: which format they are in, whether they are sound, and how they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.formats import (
    FORMATS,
    OF_BITS,
    Format,
    Unit,
    compute_dtype,
    constant,
    finite_in_all,
    units,
)
from lowbit_optim_kernels.rules import Moment
from lowbit_optim_kernels.weights import RESIDUAL_KEY, WEIGHTS, as_integers

from . import _sharding

REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Moments = tuple[Moment, ...]
Outlasted = Callable[[Tensor], Tensor]

_CAST = (
    "torch.distributed.checkpoint casts what it reads to the dtypes of this optimizer. Build one "
    "with the settings that were saved, read the checkpoint into that, and give its state_dict() "
    "to this one"
)

_LOAD_AS_SAVED = (
    "torch.distributed.checkpoint puts a whole state dict into the state of this optimizer, and "
    "casts it with broadcast_from_rank0. Give it to load_state_dict() on every rank instead, see "
    "docs/guides/sharded.md"
)


def _formats_of(saved: Mapping[str, Any], moments: Moments) -> dict[Format, set[str]]:
    """The formats whose tensors for these moments are all there, with their keys."""
    return {
        format: keys
        for format in FORMATS.values()
        if format.refusal(moments) is None and (keys := keys_of(moments, format)) <= saved.keys()
    }


def _format_of(saved: Mapping[str, Any], moments: Moments) -> Format | None:
    """Of the formats whose tensors for these moments are all there the one with most."""
    there = _formats_of(saved, moments)
    return max(there, key=lambda format: len(there[format]), default=None)


def known(saved: Mapping[str, Any], moments: Moments) -> Moments:
    """Those of these moments that saved state has, in whatever format."""
    if _format_of(saved, moments) is not None:
        return moments
    return tuple(moment for moment in moments if _format_of(saved, (moment,)) is not None)


def is_exact(saved: Mapping[str, Any], moment: Moment) -> bool:
    """Whether saved state has a moment as it was computed."""
    return all(unit.format.exact for unit in saved_units(saved, (moment,)))


def keys_of(moments: Moments, format: Format) -> set[str]:
    """The keys of these moments' tensors in a format."""
    return {part.key for unit in units(moments, format) for part in unit.parts}


def saved_units(saved: Mapping[str, Any], moments: Moments) -> tuple[Unit, ...]:
    """How saved state keeps these moments: in one format, or each in one of its own.

    Raises:
        ValueError: if tensors of a moment are missing, or there are more than its format has.
    """
    each = [_format_of(saved, (moment,)) for moment in moments]
    if None in each:  # formats may keep moments in tensors that tell none of them apart
        whole = _format_of(saved, moments)
        if whole is None:
            raise missing(moments[each.index(None)].key, saved)
        return units(moments, whole)
    of_format: dict[Format, list[Moment]] = {}
    for moment, format in zip(moments, each, strict=True):
        if format is not None:
            of_format.setdefault(format, []).append(moment)
    return tuple(unit for format, some in of_format.items() for unit in units(tuple(some), format))


def missing(key: str, saved: Mapping[str, Any]) -> ValueError:
    """The error that saved state has nothing under a key."""
    return ValueError(f"it has no {key!r}, only {sorted(map(str, saved))}")


def check(saved: Mapping[str, Any], p: Tensor, unit: Unit, outlasted: Outlasted) -> None:
    """Raise a ValueError for tensors of a unit that no step leaves behind.

    `outlasted` says where weights outlast a moment that is not finite.
    """
    check_shapes(saved, p, unit)
    for part in unit.parts:
        value = saved[part.key]
        if part.per_block:
            require_scales(part.key, value)
        else:
            require_dense(part.key, value, REAL if part.dtype is None else (part.dtype,))
    if not unit.format.exact:
        _require_coded(saved, p, unit)
    else:
        for moment in unit.moments:
            _check_numbers(moment, saved[moment.key].detach(), p, outlasted)


def _require_coded(saved: Mapping[str, Any], p: Tensor, unit: Unit) -> None:
    """Refuse codes of other numbers than 0 where all scales are 0, which no step leaves behind.

    They are numbers that were cast into the state that torch makes in a new optimizer. In that of
    an fp64 parameter scales come to 0 before its numbers do.
    """
    if p.dtype == torch.float64 or p.device.type == "meta":
        return
    if any(bool(saved[part.key].any()) for part in unit.parts if part.per_block):
        return
    zeros = constant(unit, (0.0,) * len(unit.moments))
    for part, zero in zip(unit.parts, zeros, strict=True):
        if not part.per_block and bool((saved[part.key] != zero).any()):
            raise ValueError(
                f"{part.key!r} has codes of {unit.format.name!r} and all of its scales are 0, "
                f"which no step leaves behind: they were cast on the way; {_LOAD_AS_SAVED}"
            )


def check_shapes(saved: Mapping[str, Any], p: Tensor, unit: Unit) -> None:
    """Raise a ValueError for tensors that are not of the shapes that belong to the parameter's."""
    for part in unit.parts:
        value, wanted = saved[part.key], part.shape(p.shape, unit.format.block)
        if part.per_block:
            needed = f"{wanted} is needed for a parameter of {tuple(p.shape)}"
            require_shape(part.key, value, wanted, needed)
        else:
            require_shape(repr(part.key), value, wanted)
        if part.dtype is None and not (value.is_floating_point() or value.is_complex()):
            raise ValueError(
                f"{part.key!r} is {value.dtype} and its scales {_scales_of(part.key)} are missing; "
                f"state formats that are known here: {', '.join(FORMATS)}"
            )
        if part.dtype is not None and not part.per_block and value.dtype in REAL:
            scales = ", ".join(other.key for other in unit.parts if other.per_block)
            raise ValueError(f"{part.key!r} is {value.dtype} and its scales {scales} are present")


def require_shape(name: str, value: Any, shape: Sequence[int], needed: str = "") -> None:
    """Refuse what is no tensor of this shape, by default its parameter's."""
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
        got = tuple(value.shape) if isinstance(value, Tensor) else value
        needed = needed or f"its parameter {tuple(shape)}"
        raise ValueError(f"{name} has shape {got!r}, {needed}")


def _scales_of(key: str) -> str:
    """What the formats call the scales of a moment."""
    moments = (Moment(key),)
    found = [units(moments, f) for f in FORMATS.values() if f.refusal(moments) is None]
    parts = [part for made in found for unit in made for part in unit.parts]
    return " or ".join(sorted({part.key for part in parts if part.per_block}, reverse=True))


def _check_numbers(moment: Moment, value: Tensor, p: Tensor, outlasted: Outlasted) -> None:
    # An infinite square freezes its weight, as in torch.optim; no other such number is harmless,
    # unless the weight is lost already, or outlasts it.
    if moment.signed:
        good = value.isfinite() | outlasted(value)
    else:
        good = (value >= 0) | (outlasted(value) & ~(value < 0))
    if p.device.type != "meta":
        good = good.to(p.device) | ~p.detach().isfinite()
    if not bool(good.all()):
        allowed = "finite" if moment.signed else ">= 0"
        raise ValueError(f"{moment.key!r} has elements that are not {allowed}")


def require_values(saved: Mapping[str, Any], p: Tensor) -> None:
    """Refuse tensors on the meta device, unless the parameter is there, too."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and value.device.type == "meta" and p.device.type != "meta":
            raise ValueError(f"{key!r} is a tensor on the meta device, which has no values")


def require_dense(key: str, value: Any, dtypes: tuple[torch.dtype | None, ...] = REAL) -> None:
    """Refuse what is no tensor of one of these dtypes, or a sparse one."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{key!r} must be a tensor, got {value!r}")
    if value.dtype not in dtypes or value.layout != torch.strided:
        allowed = ", ".join(map(str, dtypes))
        raise ValueError(
            f"{key!r} must be a dense tensor of {allowed}; got {value.dtype}, {value.layout}"
        )


def require_scales(key: str, value: Any) -> None:
    """Refuse scales that are no dense numbers, negative or not finite."""
    require_dense(key, value)
    if not bool(((value >= 0) & value.isfinite()).all()):
        raise ValueError(f"{key!r} has scales that are negative or not finite")


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
    complete = _formats_of(saved, coded).items() if coded else ()
    there = {format: keys for format, keys in complete if not format.exact}
    if len(there) < 2:
        return dict(saved)
    named = _named_by(group)
    kept = None if named is None or named is own else there.get(named.of(coded))
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
    if not value.is_floating_point():
        return False
    if value.layout != torch.strided or value.device.type == "meta":
        return False  # and refused by its checks
    whole = (value == value.round()) & (value >= 0) & (value <= 255)
    return bool(whole.all())


def copied(saved: Mapping[str, Any], p: Tensor, unit: Unit) -> dict[str, Tensor]:
    """A unit's saved tensors on the parameter's device, in the dtypes of its parts."""
    return {
        part.key: saved[part.key]
        .detach()
        .to(device=p.device, dtype=part.dtype or compute_dtype(p), copy=True)
        .contiguous()
        for part in unit.parts
    }


def decoded(stored: Iterable[Tensor], p: Tensor, unit: Unit) -> list[Tensor]:
    """The numbers of the moments of a parameter's unit."""
    return dispatch.decode(unit, list(stored), p.shape, compute_dtype(p))


def fitted(
    saved: Mapping[str, Any], p: Tensor, moments: Moments, format: Format
) -> tuple[dict[str, Tensor], set[str]]:
    """Moments as a parameter is to keep them, and the keys that have been read for that.

    Codes that stay in their format are copied bit for bit.
    """
    there = saved_units(saved, moments)
    for unit in there:
        check_shapes(saved, p, unit)
    formats = {moment: unit.format for unit in there for moment in unit.moments}
    state: dict[str, Tensor] = {}
    numbers: dict[Moment, Tensor] = {}
    for wanted in units(moments, format):
        same = tuple(m for m in wanted.moments if formats[m] is wanted.format)
        for unit in units(same, wanted.format):
            state.update(copied(saved, p, unit))
        other = tuple(m for m in wanted.moments if m not in same)
        if not other:
            continue
        if not numbers:
            for unit in there:
                values = decoded(copied(saved, p, unit).values(), p, unit)
                numbers.update(zip(unit.moments, values, strict=True))
        values = [numbers[moment] for moment in other]
        if not wanted.format.exact:  # as in a step
            values = finite_in_all(values)
        for unit in units(other, wanted.format):
            state.update(dispatch.encode(unit, values, p.shape))
    return state, {part.key for unit in there for part in unit.parts}


def read(saved: Mapping[str, Any], p: Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
    """A saved moment's numbers, and how far from them what was rounded to them may have been."""
    (unit,) = saved_units(saved, (moment,))
    check_shapes(saved, p, unit)
    stored = list(copied(saved, p, unit).values())
    (x,) = decoded(stored, p, unit)
    if unit.format.exact:
        return x, torch.finfo(saved[moment.key].dtype).eps * x.abs()
    neighbours = [decoded(near, p, unit)[0] for near in unit.format.neighbours(stored)]
    return x, torch.stack([(y - x).abs() for y in neighbours]).amax(0) / 2
