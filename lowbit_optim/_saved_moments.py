"""Moments of a saved state: the format they are in, whether they are sound, and how they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels import dispatch
from lowbit_optim_kernels.formats import (
    FORMATS,
    Format,
    Part,
    Unit,
    compute_dtype,
    finite_in_all,
    parts_of,
    units,
)
from lowbit_optim_kernels.rules import Moment

from ._tensor_checks import (
    REAL,
    all_finite,
    extent,
    missing,
    require_dense,
    require_scales,
    require_shape,
    true_everywhere,
)

Moments = tuple[Moment, ...]
HarmlessMask = Callable[[Tensor], Tensor]


def formats_of(saved: Mapping[str, Any], moments: Moments) -> dict[Format, set[str]]:
    """The formats whose tensors for these moments are all there, with their keys."""
    return {
        format: keys
        for format in FORMATS.values()
        if format.refusal(moments) is None and (keys := keys_of(moments, format)) <= saved.keys()
    }


def _format_of(saved: Mapping[str, Any], moments: Moments) -> Format | None:
    """The format with most tensors, of those whose tensors for these moments are all there."""
    there = formats_of(saved, moments)
    return max(there, key=lambda format: len(there[format]), default=None)


def present_moments(saved: Mapping[str, Any], moments: Moments) -> Moments:
    """The moments that saved state has, of these, in whatever format."""
    if _format_of(saved, moments) is not None:
        return moments
    return tuple(moment for moment in moments if _format_of(saved, (moment,)) is not None)


def is_exact(saved: Mapping[str, Any], moment: Moment) -> bool:
    """Whether saved state has a moment as it was computed."""
    return all(unit.format.exact for unit in saved_units(saved, (moment,)))


def keys_of(moments: Moments, format: Format) -> set[str]:
    """The keys of these moments' tensors in a format."""
    return {part.key for part in parts_of(moments, format)}


def keys_of_present(saved: Mapping[str, Any], moments: Moments, format: Format) -> set[str]:
    """The keys that the moments which saved state has get in a format.

    Raises:
        ValueError: if there are some that the format keeps in one tensor with others.
    """
    there = present_moments(saved, moments)
    if there and format.refusal(there) is not None:
        raise missing(next(m.key for m in moments if m not in there), saved)
    return keys_of(there, format)


def _first_missing(saved: Mapping[str, Any], moments: Moments) -> str:
    """The first key that saved state lacks of the format of which it has the largest share."""
    possible = [format for format in FORMATS.values() if format.refusal(moments) is None]
    keys_of_each = [[part.key for part in parts_of(moments, format)] for format in possible]
    likeliest = max(keys_of_each, key=lambda keys: sum(key in saved for key in keys) / len(keys))
    return next(key for key in likeliest if key not in saved)


def saved_units(saved: Mapping[str, Any], moments: Moments) -> tuple[Unit, ...]:
    """The units of these moments in saved state: in one format, or each in one of its own.

    Raises:
        ValueError: if tensors of a moment are missing, or there are more than its format has, or it
            is coded relative to one that is not coded with it.
    """
    each = [_format_of(saved, (moment,)) for moment in moments]
    if None in each:  # formats may keep moments in tensors that tell none of them apart
        whole = _format_of(saved, moments)
        if whole is None:
            raise missing(_first_missing(saved, moments), saved)
        return units(moments, whole)
    of_format: dict[Format, list[Moment]] = {}
    for moment, format in zip(moments, each, strict=True):
        if format is not None:
            of_format.setdefault(format, []).append(moment)
    keys = {moment.key for moment in moments}
    for format, some in of_format.items():
        beside = keys - {moment.key for moment in some}
        for moment in some:
            if format.relative and moment.partner in beside:
                _require_numbers(moment.partner, saved[moment.partner])
                raise ValueError(
                    f"{moment.key!r} has codes of {format.name!r}, which are relative to those of "
                    f"{moment.partner!r}, and this is stored otherwise; give both as numbers"
                )
    return tuple(unit for format, some in of_format.items() for unit in units(tuple(some), format))


def check_unit(saved: Mapping[str, Any], p: Tensor, unit: Unit, harmless: HarmlessMask) -> None:
    """Raise a ValueError for tensors of a unit that no step leaves behind.

    `harmless` says where weights outlast a moment that is not finite.
    """
    check_stored(saved, p, unit)
    for part in unit.parts:
        if part.per_block:
            require_scales(part.key, saved[part.key], _dtype(part, p))
    if unit.format.exact:
        for moment in unit.moments:
            _check_numbers(moment, saved[moment.key].detach(), p, harmless)


def check_stored(saved: Mapping[str, Any], p: Tensor, unit: Unit) -> None:
    """Raise a ValueError for tensors whose shapes, dtypes or layouts are not those of the unit."""
    for part in unit.parts:
        value, wanted = saved[part.key], part.shape(p.shape, unit.format.block)
        if part.per_block:
            needed = f"{wanted} is needed for a parameter of {tuple(p.shape)}"
            require_shape(part.key, value, wanted, needed)
        else:
            require_shape(repr(part.key), value, wanted)
        if part.dtype is None:
            _require_numbers(part.key, value)
        coded = part.dtype is not None and not part.per_block
        if coded and value.dtype in REAL:
            scales = ", ".join(other.key for other in unit.parts if other.per_block)
            raise ValueError(
                f"{part.key!r} is {value.dtype} and its scales {scales} are present; numbers are "
                f"given without scales, and codes as {part.dtype}, to which this optimizer's "
                "load_state_dict keeps them and torch.optim.Optimizer's does not"
            )
        require_dense(part.key, value, (part.dtype,) if coded else REAL)


def _require_numbers(key: str, value: Any) -> None:
    """Refuse codes without their scales."""
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        raise ValueError(
            f"{key!r} is {value.dtype} and its scales {_scales_of(key)} are missing; state formats "
            f"that are known here: {', '.join(FORMATS)}"
        )


def _scales_of(key: str) -> str:
    """The keys that formats give the scales of a moment, in words."""
    moments = (Moment(key),)
    found = [parts_of(moments, f) for f in FORMATS.values() if f.refusal(moments) is None]
    parts = [part for each in found for part in each]
    return " or ".join(sorted({part.key for part in parts if part.per_block}, reverse=True))


def _check_numbers(moment: Moment, value: Tensor, p: Tensor, harmless: HarmlessMask) -> None:
    dtype = compute_dtype(p)
    if all_finite(value, dtype=dtype) if moment.signed else extent(value)[0] >= 0:
        return
    value = value.to(dtype)
    # An infinite square freezes its weight, as in torch.optim; no other such number is harmless,
    # unless the weight is lost already, or outlasts it.
    if moment.signed:
        good = value.isfinite() | harmless(value)
    else:
        good = (value >= 0) | (harmless(value) & ~(value < 0))
    if p.device.type != "meta":
        good = good.to(p.device) | ~p.detach().isfinite()
    if not true_everywhere(good):
        allowed = f"finite as {dtype}" if moment.signed else ">= 0"
        raise ValueError(f"{moment.key!r} has elements that are not {allowed}")


def _tensor(saved: Mapping[str, Any], p: Tensor, part: Part) -> Tensor:
    """A copy of a saved tensor on the parameter's device, in the dtype of its part."""
    saved_tensor = saved[part.key].detach()
    tensor: Tensor = saved_tensor.to(device=p.device, dtype=_dtype(part, p), copy=True)
    return tensor.contiguous()


def _dtype(part: Part, p: Tensor) -> torch.dtype:
    """The dtype of a part of a parameter's moments."""
    return part.dtype or compute_dtype(p)


def _decoded(stored: list[Tensor], p: Tensor, unit: Unit) -> list[Tensor]:
    """The numbers of the moments of a parameter's unit."""
    return dispatch.decode(unit, stored, p.shape, compute_dtype(p))


def codable(values: list[Tensor]) -> list[Tensor]:
    """Moments as a step codes them: zero where one of them is not finite, else themselves."""
    return values if all(map(all_finite, values)) else finite_in_all(values)


def moments_in_format(
    saved: Mapping[str, Any], p: Tensor, moments: Moments, format: Format
) -> tuple[dict[str, Tensor], set[str]]:
    """Moments as a parameter is to keep them, and the keys that have been read for that.

    Codes that stay in their format are copied bit for bit.
    """
    there = saved_units(saved, moments)
    for unit in there:
        check_stored(saved, p, unit)
    formats = {moment: unit.format for unit in there for moment in unit.moments}
    state: dict[str, Tensor] = {}
    numbers: dict[Moment, Tensor] = {}
    for wanted in units(moments, format):
        other = tuple(m for m in wanted.moments if formats[m] is not wanted.format)
        if other and wanted.format.relative:
            other = wanted.moments
        coded: dict[str, Tensor] = {}
        if other:
            if not numbers:
                for unit in there:
                    values = _decoded([_tensor(saved, p, x) for x in unit.parts], p, unit)
                    numbers.update(zip(unit.moments, values, strict=True))
            values = [numbers[moment] for moment in other]
            if not wanted.format.exact:  # as in a step
                values = codable(values)
            (unit,) = units(other, wanted.format)
            coded = dispatch.encode(unit, values, p.shape)
        for part in wanted.parts:
            new = coded.get(part.key)
            state[part.key] = _tensor(saved, p, part) if new is None else new
    return state, {part.key for unit in there for part in unit.parts}


def read_with_error(saved: Mapping[str, Any], p: Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
    """A saved moment's numbers, and how far from them what was rounded to them may have been."""
    (unit,) = saved_units(saved, (moment,))
    check_stored(saved, p, unit)
    stored = [_tensor(saved, p, part) for part in unit.parts]
    (x,) = _decoded(stored, p, unit)
    if unit.format.exact:
        return x, torch.finfo(saved[moment.key].dtype).eps * x.abs()
    neighbours = [_decoded(near, p, unit)[0] for near in unit.format.neighbours(stored)]
    return x, torch.stack([(y - x).abs() for y in neighbours]).amax(0) / 2
