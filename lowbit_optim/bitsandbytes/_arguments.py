"""Constructors with the arguments of bitsandbytes 0.49, where they differ from this package's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from .. import _bitsandbytes_arguments, _checks
from .._arguments import constructor
from .._manager import GlobalOptimManager
from .._optimizer import LowBitOptimizer
from .._settings import WIDTH_AND_FORMAT

T = TypeVar("T", bound=type[LowBitOptimizer])

REQUIRED = inspect.Parameter.empty
SWITCHES = {"block_wise": True, "is_paged": False}  # with the values that ask for what there is
_warned: set[tuple[type, str]] = set()


class Bitsandbytes:
    """Base of the classes with bitsandbytes' names: what else a user reaches for on an instance."""

    @property
    def mng(self) -> GlobalOptimManager:
        """The process's manager of overrides."""
        return GlobalOptimManager.get_instance()


def bitsandbytes_arguments(
    *, paged: bool = False, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[T], T]:
    """Give a subclass of an optimizer the arguments that bitsandbytes' class of its name has.

    The optimizer has them in their order; what differs is said here. Its own arguments, which are
    keyword-only, follow. To ask for pages or for state without blocks warns once per class.

    Args:
        paged: whether it is one of the paged classes, whose state is not paged here.
        without: arguments that bitsandbytes' class lacks.
        defaults: defaults that are not the optimizer's; `REQUIRED` for none. An `optim_bits` given
            here is accepted and means the class's own width, as in bitsandbytes; `block_wise` is
            warned of only where it is passed.
    """
    unsaid = {*SWITCHES, "optim_bits"}  # unless they are given
    settings = {k: v for k, v in defaults.items() if k not in unsaid and v is not REQUIRED}

    def fix(cls: T) -> T:
        def construct(build: Callable[..., None], given: dict[str, Any], _: str) -> None:
            switches = {key: given.pop(key) for key in SWITCHES if key in given}
            _checks.optim_bits(given.get("optim_bits"))
            if "optim_bits" in defaults and given.get("optim_bits") == defaults["optim_bits"]:
                del given["optim_bits"]
            build(**{**settings, **given})
            _warn_once(cls, switches, paged)

        # Which classes of one width take by name, as they are asked for by an optimizer's defaults.
        fixed = {*WIDTH_AND_FORMAT} - inspect.signature(cls).parameters.keys()
        return constructor(cls, defaults, without, construct, fixed=fixed)

    return fix


def _warn_once(cls: type, switches: dict[str, Any], paged: bool) -> None:
    """Warn of what a constructor was asked for and there is not, if nobody has been warned yet."""
    for key, value in switches.items():
        _checks.flag(key, value)
        if value != SWITCHES[key] and (cls, key) not in _warned:
            _bitsandbytes_arguments.switches(**{key: value})
            _warned.add((cls, key))
    if paged and (cls, "paged") not in _warned:
        _checks.warn_user(f"{cls.__name__} pages nothing: state stays on its parameter's device")
        _warned.add((cls, "paged"))
