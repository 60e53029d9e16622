"""Arguments that constructors have from bitsandbytes: `args`, switches, their positional order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._checks import flag, warn_user
from ._settings import plain

ARGS = ("optim_bits", "min_8bit_size", "percentile_clipping", "max_unorm")
ALSO = ("block_wise", "skip_zeros")


def switches(block_wise: Any = True, is_paged: Any = False) -> None:
    """Warn of bitsandbytes' arguments that ask for what there is not."""
    flag("block_wise", block_wise := plain(block_wise))
    flag("is_paged", is_paged := plain(is_paged))
    if not block_wise:
        warn_user(
            "block_wise=False has no effect: 8-bit state always has one scale per block of "
            "elements; optim_bits=32 is state without blocks"
        )
    if is_paged:
        warn_user(
            "is_paged=True has no effect: state stays on its parameter's device and is not paged "
            "to the host; optim_bits=8 makes it four times as small"
        )


def positional_order(percentile_clipping: Any, follower: str) -> None:
    """Refuse a call in the positional order of bitsandbytes 0.50, where its types show it.

    `percentile_clipping` and `block_wise` are gone there, so that what stood after them, `is_paged`
    or `max_unorm`, comes first. A `max_unorm` that is an integer cannot be told apart.
    """
    if isinstance(percentile_clipping, bool if follower == "is_paged" else float):
        raise ValueError(
            f"percentile_clipping must be an integer 0..100, got {percentile_clipping!r}; "
            "bitsandbytes 0.50 dropped percentile_clipping and block_wise from the positional "
            f"order: pass {follower} by keyword"
        )


def from_args(args: Any, name: str, otherwise: Any) -> Any:
    """A setting's value in bitsandbytes' `args`, an object or a dict."""
    if isinstance(args, Mapping):
        return args.get(name, otherwise)
    return getattr(args, name, otherwise)


def replace_by_args(defaults: dict[str, Any], args: Any) -> None:
    """Let bitsandbytes' `args` replace the constructor's values, and warn of a switch in it.

    Its `skip_zeros` would be other numbers, and is refused.
    """
    known = (*ARGS, *ALSO)
    if args is not None and all(from_args(args, name, None) is None for name in known):
        raise TypeError(
            f"args must be an object or a dict with any of {', '.join(known)}; got {args!r}"
        )
    if from_args(args, "skip_zeros", False):
        raise ValueError(
            "args asks for skip_zeros, which there is not: an element whose gradient is 0 is "
            "stepped like any other; leave it out or set it to False"
        )
    switches(bool(from_args(args, "block_wise", True)))
    for name in ARGS:
        defaults[name] = from_args(args, name, defaults[name])
