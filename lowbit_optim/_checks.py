"""Argument checks of the front-ends: each names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch

from lowbit_optim_kernels import weights
from lowbit_optim_kernels.dither import SEEDS
from lowbit_optim_kernels.formats import FORMATS, OF_BITS

LARGEST_INTEGER = 2**63 - 1  # that torch takes


def is_number(value: Any) -> bool:
    """Whether a value is a real number: no flag, no tensor, no array."""
    return isinstance(value, Real) and not isinstance(value, bool)


def number(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse what is not a finite number in [low, high], or in an interval without its ends."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        x = float(value)
    except OverflowError:  # an integer beyond all of them
        x = math.inf
    outside = x <= low if open_low else x < low
    outside |= x >= high if open_high else x > high
    if outside or not math.isfinite(x):
        lower = "" if low == -math.inf else f", {'>' if open_low else '>='} {low:g}"
        upper = "" if high == math.inf else f" and {'<' if open_high else '<='} {high:g}"
        raise ValueError(f"{name} must be finite{lower}{upper}; got {value!r}")
    if isinstance(value, Integral) and abs(int(value)) > LARGEST_INTEGER:
        raise ValueError(f"{name} must be a float, not an integer, beyond 2**63 - 1; got {value!r}")


def positive(name: str, value: Any, high: float = math.inf) -> None:
    """Refuse what is not a finite number in (0, high]."""
    number(name, value, 0.0, high, open_low=True)


def numbers(group: Mapping[str, Any], *names: str) -> None:
    """Refuse settings that are not finite numbers >= 0."""
    for name in names:
        number(name, group[name], 0.0)


def _on_accelerator(name: str, value: Any) -> bool:
    """Whether a value is a tensor of one element that lies where a step does not read it back."""
    if not isinstance(value, torch.Tensor):
        return False
    if value.numel() != 1 or value.is_complex():
        raise ValueError(f"{name} must be a number or a real tensor of one element; got {value!r}")
    return value.device.type != "cpu"


def learning_rate(value: Any) -> None:
    """Refuse a learning rate that is not finite, or a tensor of several elements.

    A negative one is taken: schedules overshoot zero by a rounding, and torch's optimizers step
    with what they give. `initial_learning_rate` is for what a user writes.
    """
    if not _on_accelerator("lr", value):
        number("lr", value.item() if isinstance(value, torch.Tensor) else value, -math.inf)


def initial_learning_rate(value: Any) -> None:
    """Refuse a learning rate that is negative, too; a tensor is read wherever it lies."""
    learning_rate(value)
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise ValueError(
            f"lr must have a value, which no tensor on the meta device has; got {value!r}"
        )
    number("lr", value.item() if isinstance(value, torch.Tensor) else value, 0.0)


def betas(value: Any, count: int) -> None:
    """Refuse betas that are not `count` numbers in [0, 1), or tensors of one element."""
    if not isinstance(value, (tuple, list)) or len(value) != count:
        raise ValueError(f"betas must be {count} numbers in [0, 1); got {value!r}")
    for i, beta in enumerate(value):
        if not _on_accelerator(f"betas[{i}]", beta):
            number(f"betas[{i}]", beta, 0.0, 1.0, open_high=True)


def flag(name: str, value: Any) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")


def flags(group: Mapping[str, Any], *names: str) -> None:
    """Refuse settings that are not True or False."""
    for name in names:
        flag(name, group[name])


def optional_flag(name: str, value: Any) -> None:
    """Refuse what is not True, False or None."""
    if value is not None:
        flag(name, value)


def module(name: str, value: Any) -> None:
    """Refuse what is no module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module; got {type(value).__name__}")


def parameters(value: Any) -> None:
    """Refuse a module in place of its parameters, and what cannot be walked through."""
    is_list = isinstance(value, torch.nn.ParameterList)
    if not isinstance(value, Iterable) or (isinstance(value, torch.nn.Module) and not is_list):
        raise TypeError(
            "params must be an iterable of parameters or of parameter groups, such as "
            f"model.parameters(); got {type(value).__name__}"
        )


def several(name: str, value: Any, what: str) -> None:
    """Refuse what cannot be walked through, and a string."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {what}; got {value!r}")


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse what is not among the allowed values."""
    single = value is None or isinstance(value, str) or is_number(value)  # and not an array
    if not single or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def bounds(name: str, value: Any) -> None:
    """Refuse what is neither None nor a pair 0 <= low <= high (high may be infinite)."""
    if value is None:
        return
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be None or a pair (low, high); got {value!r}")
    low, high = value
    number(f"{name}[0]", low, 0.0)
    if not is_number(high) or not high >= low:
        raise ValueError(f"{name} must have 0 <= low <= high; got {value!r}")


def integer(name: str, value: Any, low: int, high: int = LARGEST_INTEGER) -> None:
    """Refuse what is not an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer >= {low} and <= {high}; got {value!r}")


def state_format(value: Any) -> None:
    """Refuse what is neither None nor the name of a state format."""
    one_of("state_format", value, (None, *FORMATS))


def optim_bits(value: Any) -> None:
    """Refuse what cannot be compared, as an array of several; `storage` says which bits may be."""
    try:
        bool(value == 8)
    except (RuntimeError, ValueError):
        raise ValueError(
            f"optim_bits must be one of {', '.join(map(str, OF_BITS))}; got {value!r}"
        ) from None


def storage(group: Mapping[str, Any]) -> None:
    """Refuse bits that mean no format, or not the one that is named beside them."""
    bits, name = group["optim_bits"], group["state_format"]
    state_format(name)
    if name is None:
        one_of("optim_bits", bits, tuple(OF_BITS))
    elif bits != FORMATS[name].bits or isinstance(bits, bool):
        raise ValueError(
            f"optim_bits and state_format must agree; got optim_bits={bits!r} and "
            f"state_format={name!r}, which has {FORMATS[name].bits} bits"
        )


def master_weight_bits(value: Any) -> None:
    """Refuse what is no width of master weights."""
    one_of("master_weight_bits", value, (*weights.WEIGHTS, "auto"))


def common(group: Mapping[str, Any]) -> None:
    """Check the settings that every optimizer has."""
    learning_rate(group["lr"])
    storage(group)
    integer("min_8bit_size", group["min_8bit_size"], 0)
    integer("percentile_clipping", group["percentile_clipping"], 0, 100)
    numbers(group, "max_unorm")
    integer("seed", group["seed"], 0, SEEDS - 1)
    master_weight_bits(group["master_weight_bits"])
    flags(group, "dither", "maximize", "capturable", "differentiable")
    optional_flag("foreach", group["foreach"])
    optional_flag("fused", group["fused"])
    if group["differentiable"]:
        raise ValueError(
            "differentiable=True is not supported: the step is a fused kernel that autograd "
            "does not see; pass differentiable=False"
        )
    if "cautious" in group:
        flag("cautious", group["cautious"])
        if group["cautious"] and group.get("momentum", 1) == 0:
            raise ValueError(
                "cautious=True needs momentum, got momentum=0: without it every update has its "
                "gradient's sign"
            )
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach and fused cannot both be True; leave one of them None")


def warn_user(message: str, *others: str) -> None:
    """Warn at the line outside this package that called it, however many constructors deep.

    Args:
        message: what to say.
        others: further packages whose lines the warning is not to point at.
    """
    frame, level, inside = sys._getframe(1), 2, {__package__, *others}
    while (
        frame.f_back is not None
        and str(frame.f_globals.get("__name__", "")).partition(".")[0] in inside
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def momentum(group: Mapping[str, Any]) -> None:
    """Check the settings of SGD's momentum and coupled weight decay."""
    numbers(group, "momentum", "weight_decay")
    number("dampening", group["dampening"], 0.0, 1.0)
    flag("nesterov", group["nesterov"])


def nesterov(group: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    """Check that what a user asks Nesterov's momentum of has one.

    A group need not that only inherits it, as in torch.optim, nor a step: a scheduler that cycles
    momentum may come to 0, which is stepped without.

    Args:
        group: the constructor's settings, or those of a group.
        inherited: what a group has that says nothing; empty for the constructor's.
    """
    asked = group["nesterov"] and not inherited.get("nesterov", False)
    if asked and (group["momentum"] == 0 or group["dampening"] != 0):
        raise ValueError(
            "nesterov=True needs a momentum > 0 and a dampening of 0; got "
            f"momentum={group['momentum']!r}, dampening={group['dampening']!r}"
        )
