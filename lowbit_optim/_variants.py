"""`X8bit` and `X32bit`: an optimizer whose `optim_bits` is fixed by its name."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from . import _checks
from ._optimizer import LowBitOptimizer

T = TypeVar("T", bound=type[LowBitOptimizer])


def fixed_bits(base: T, bits: int, keep_argument: bool = False) -> T:
    """A subclass of `base` that keeps `bits`-bit state.

    Args:
        base: the optimizer `X`.
        bits: 8 or 32.
        keep_argument: True where bitsandbytes' class of this name has `optim_bits` in its
            positional order; it must then be `bits`. Otherwise the argument is gone.

    Returns:
        The class `X8bit` or `X32bit`, with base's signature but for `optim_bits`.
    """
    signature = inspect.signature(base.__init__)
    parameters = [
        parameter.replace(default=bits) if name == "optim_bits" else parameter
        for name, parameter in signature.parameters.items()
        if name != "optim_bits" or keep_argument
    ]
    signature = signature.replace(parameters=parameters)
    name = f"{base.__name__}{bits}bit"

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        given = dict(bound.arguments)
        given.pop("self")
        asked = given.pop("optim_bits", bits)
        if asked != bits:
            raise ValueError(
                f"optim_bits must be {bits} for {name}, got {asked!r}; use {base.__name__}, "
                "or a parameter group's optim_bits"
            )
        replaced = _checks.from_args(given.get("args"), "optim_bits", bits)
        if replaced != bits:
            raise ValueError(f"args.optim_bits must be {bits} for {name}, got {replaced!r}")
        super(made, self).__init__(**given, optim_bits=bits)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    body = {
        "__init__": __init__,
        "__module__": base.__module__,
        "__qualname__": name,
        "__doc__": f"`{base.__name__}` with {bits}-bit state; see there for its arguments.",
    }
    made: Any = type(name, (base,), body)
    return made
