"""State dicts of torchao's low-bit Adam and AdamW: tensors that know how they are stored.

Their keys are torch.optim's. A moment of 4096 elements or more is a tensor subclass with `codes`
and `scale`, one a block of the flattened tensor: uint8 codes with a code book `qmap` of 256 numbers
(`OptimState8bit`), two codes a byte with one of 16 (`OptimState4bit`), or fp8 numbers
(`OptimStateFp8`). Only these attributes are read, so torchao itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.rules.adam import AMSGRAD

from .._tensor_checks import require_dense, require_scales, require_shape, require_values
from .coded import Coded, check_book
from .library import Library

FP8 = torch.float8_e4m3fn


class TorchAO(Library):
    """torchao's state dicts of 8 and 4 bits and of fp8."""

    name = "torchao"
    families = ("Adam", "AdamW")

    def recognises(self, state_dict: Mapping[str, Any]) -> bool:
        """By a moment that has codes and scales of its own."""
        states = [one for one in state_dict["state"].values() if isinstance(one, Mapping)]
        return any(_is_stored(value) for one in states for value in one.values())

    def group(self, saved: Mapping[str, Any], family: str) -> dict[str, Any]:
        """Its settings are ours; its `lr` is always a tensor, and a number here."""
        lr = saved.get("lr")
        if isinstance(lr, Tensor) and lr.numel() == 1 and not lr.is_meta:
            return {**saved, "lr": lr.item()}
        return dict(saved)

    def state(
        self, saved: Mapping[str, Any], p: Tensor, family: str
    ) -> tuple[dict[str, Any], bool]:
        """Its moments as codes or numbers; what is no such tensor is left as it is."""
        state, exact = dict(saved), []
        for moment in AMSGRAD:
            value = saved.get(moment.key)
            if not _is_stored(value):
                continue
            read = _read(value, moment.key, p)
            numbers = {moment.key: read}, False
            own, kept = read.saved(moment) if isinstance(read, Coded) else numbers
            state.update(own)
            exact.append(kept)
        return state, all(exact)

    def codes(self, saved: Mapping[str, Any], p: Tensor, family: str) -> dict[str, Coded]:
        """Those of 8 and 4 bits; fp8 are numbers."""
        keys = [moment.key for moment in AMSGRAD if _is_stored(saved.get(moment.key))]
        read = {key: _read(saved[key], key, p) for key in keys}
        return {key: value for key, value in read.items() if isinstance(value, Coded)}


TORCHAO = TorchAO()


def _is_stored(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "codes") and hasattr(value, "scale")


def _read(value: Any, key: str, p: Tensor) -> Coded | Tensor:
    """A moment's codes, or the numbers that it has in fp8."""
    numel = p.numel()
    codes, scale, book = value.codes.detach(), value.scale.detach(), getattr(value, "qmap", None)
    require_values({f"{key}.codes": codes, f"{key}.scale": scale, f"{key}.qmap": book}, p)
    require_shape(repr(key), value, p.shape)
    require_scales(f"{key}.scale", scale)
    if scale.ndim != 1 or scale.numel() == 0 or numel % scale.numel():
        raise ValueError(
            f"'{key}.scale' has shape {tuple(scale.shape)}; one number a block of equal size is "
            f"needed, so that their count divides {numel}"
        )
    block = numel // scale.numel()
    packed = book is not None and tuple(book.shape) == (16,) and numel % 2 == 0
    require_dense(f"{key}.codes", codes, (FP8,) if book is None else (torch.uint8,))
    wanted = (numel // 2,) if packed else tuple(p.shape)
    require_shape(f"'{key}.codes'", codes, wanted, f"{wanted} is needed")
    if book is None:
        return _of_fp8(key, codes, scale)
    check_book(f"{key}.qmap", book, 16 if packed else 256)
    if packed:
        codes = torch.stack([codes >> 4, codes & 15], -1).reshape(p.shape)
    return Coded(f"{key}.codes", codes.contiguous(), scale, book, block)


def _of_fp8(key: str, codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers that fp8 codes stand for."""
    numbers = codes.float().reshape(scale.numel(), -1) * scale.float()[:, None]
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"'{key}.codes' has elements that are not finite")
    return numbers.reshape(codes.shape)
