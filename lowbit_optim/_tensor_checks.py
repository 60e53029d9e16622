"""Checks of tensors: shape, dtype, layout, values, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def missing(key: str, saved: Mapping[str, Any]) -> ValueError:
    """The error that saved state has nothing under a key."""
    return ValueError(f"it has no {key!r}, only {sorted(map(str, saved))}")


def shape_or_value(x: Any) -> Any:
    """A tensor's shape as a tuple, or what stands in its place; for errors."""
    return tuple(x.shape) if isinstance(x, Tensor) else x


def require_shape(name: str, value: Any, shape: Sequence[int], needed: str = "") -> None:
    """Refuse what is no tensor of this shape, by default its parameter's."""
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
        needed = needed or f"its parameter {tuple(shape)}"
        raise ValueError(f"{name} has shape {shape_or_value(value)!r}, {needed}")


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


def has_address(x: Tensor) -> bool:
    """Whether a tensor has an address; one that is empty or has no memory has none."""
    try:
        return x.data_ptr() != 0
    except RuntimeError:  # it has no storage
        return False


def require_memory(x: Tensor, what: str, name: str) -> None:
    """Raise a RuntimeError for a tensor that has elements and no memory to read them from.

    Args:
        x: the tensor.
        what: what it is, for the error.
        name: that of the optimizer's class.
    """
    if torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise RuntimeError(
            f"{name}: {what} of shape {tuple(x.shape)} is a tensor of a transform of torch.func, "
            "such as functionalize or vmap, and has no memory of its own; step outside of it"
        )
    freed = not x.untyped_storage().nbytes() or x._is_zerotensor()
    if x.numel() and freed and x.device.type != "meta":
        raise RuntimeError(
            f"{name}: {what} of shape {tuple(x.shape)} has no memory, as after "
            "`untyped_storage().resize_(0)`"
        )


def true_everywhere(mask: Tensor) -> bool:
    """Whether nothing in a mask is False; on the meta device there is nothing."""
    return mask.is_meta or bool(mask.all())


def extent(x: Tensor) -> tuple[float, float]:
    """The least and the largest number of a tensor, both NaN if one is; inf and -inf of none.

    None are on the meta device. No temporary is as large as the tensor, as masks are, nor takes
    their time.
    """
    if x.is_meta or not x.numel():
        return math.inf, -math.inf
    x = x.detach()
    least, largest = torch.stack((x.amin(), x.amax())).tolist()
    return least, largest


def all_finite(
    x: Tensor, at_least: float = -math.inf, dtype: torch.dtype = torch.float64
) -> bool:  # fmt: skip
    """Whether no number of a tensor is less than this, NaN, or infinite in a dtype."""
    least, largest = extent(x)
    most = torch.finfo(dtype).max
    return max(at_least, -most) <= least and largest <= most


def require_scales(key: str, value: Any, dtype: torch.dtype = torch.float32) -> None:
    """Refuse scales that are no dense numbers, negative or not finite in the dtype they get."""
    require_dense(key, value)
    if not all_finite(value, 0, dtype):
        raise ValueError(f"{key!r} has scales that are negative or not finite as {dtype}")
