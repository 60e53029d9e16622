"""`X4bit`, `X8bit` and `X32bit`: an optimizer whose `optim_bits` is fixed by its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lowbit_optim_kernels.formats import FORMATS

from . import _bitsandbytes_arguments, _checks
from ._arguments import constructor
from ._optimizer import LowBitOptimizer

T = TypeVar("T", bound=type[LowBitOptimizer])


def fixed_bits(bits: int, keep_argument: bool = False) -> Callable[[T], T]:
    """Make a subclass of an optimizer `X` its `X4bit`, `X8bit` or `X32bit`.

    It gets a constructor with X's signature, without `optim_bits` and, with 4 or 32 bits, which
    leave no choice, without `state_format`; and every argument's description in its docstring. So
    that `type(optimizer)(params, **optimizer.defaults)` makes another one, it takes both by name
    where they say what the class's name does.

    Args:
        bits: 4, 8 or 32.
        keep_argument: True where bitsandbytes' class of this name has `optim_bits` in its
            positional order; it must then be `bits`. Otherwise the signature is without it.
    """
    formats = [name for name, format in FORMATS.items() if format.bits == bits]
    special = {
        "optim_bits": f"must be {bits}; it is here for bitsandbytes' order.",
        "state_format": "name of the format that the moments are stored in: "
        f"{', '.join(formats)}. None is {formats[0]}.",
    }
    gone = set() if keep_argument else {"optim_bits"}
    if bits in (4, 32):
        gone.add("state_format")

    def fix(cls: T) -> T:
        base: Any = cls.__base__

        def construct(build: Callable[..., None], given: dict[str, Any], name: str) -> None:
            asked = given.pop("optim_bits", bits)
            _checks.optim_bits(asked)
            if asked != bits:
                raise ValueError(
                    f"optim_bits must be {bits} for {name}, got {asked!r}; use {base.__name__}, "
                    "or a parameter group's optim_bits"
                )
            replaced = _bitsandbytes_arguments.from_args(given.get("args"), "optim_bits", bits)
            _checks.optim_bits(replaced)
            if replaced != bits:
                raise ValueError(f"args.optim_bits must be {bits} for {name}, got {replaced!r}")
            format = given.get("state_format")
            _checks.state_format(format)
            if format is not None and FORMATS[format].bits != bits:
                other = f"{base.__name__}{FORMATS[format].bits}bit"
                hint = f"; use {other}" if hasattr(sys.modules[cls.__module__], other) else ""
                raise ValueError(
                    f"state_format must be one of {bits} bits for {name}, got {format!r}, which "
                    f"has {FORMATS[format].bits}{hint}"
                )
            build(**given, optim_bits=bits)

        return constructor(cls, {"optim_bits": bits}, gone, construct, special, fixed=gone)

    return fix
