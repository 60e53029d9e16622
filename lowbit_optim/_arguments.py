"""Constructor arguments: the settings among them, and their descriptions in docstrings.

A front-end writes its signature out, for people, type checkers and editors. What follows from the
signature is made from it: a group's defaults, the default of each argument in the docstring, and
the description of every argument that others have, too.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=type)

NON_SETTING_ARGUMENTS = (
    "self", "__class__", "params", "defaults", "args", "kwargs", "block_wise", "is_paged",
)  # fmt: skip
WIDTH = 100
COMMON = """
Args:
    params: parameters, named parameters or parameter groups.
    lr: learning rate, a number or a tensor of one element.
    optim_bits: 32, 8 or, where `state_format` can be "ratio4", 4, the width of the moments.
    args: object or dict whose `optim_bits`, `min_8bit_size`, `percentile_clipping` and `max_unorm`
        replace these arguments where present; a false `block_wise` in it warns, too, and
        bitsandbytes' `skip_zeros`, which there is not, is refused. It has one of the six at least.
    min_8bit_size: tensors with fewer elements keep 32-bit state.
    percentile_clipping: clip the gradient's norm to this percentile (0..100) of the last 100 steps'
        norms, all of which are at first the first one that is not 0; 100 is off.
    block_wise: as in bitsandbytes; state is blockwise either way, and False only warns.
    is_paged: as in bitsandbytes; nothing is paged here, and True warns.
    max_unorm: cap ||u|| at max_unorm ||p||; 0 is off.
    cautious: skip the elements whose update and gradient (with a coupled weight decay) differ in
        sign, and divide the update of the others by their share of all, or by .001 if that is less
        (arXiv:2411.16085). It needs momentum.
    state_format: name of the format that the moments are stored in; it decides `optim_bits`. None
        is what `optim_bits` means: "ratio4" for 4, "dynamic8" for 8, "float32" for 32.
    dither: round squares and slow averages by counted random bits instead of to nearest, so that
        they go on moving when a step changes them by less than a code.
    seed: of the random bits by which `dither` and bf16 weights are rounded; 0 to 2^32 - 1.
    master_weight_bits: the precision in which bf16 parameters are kept between steps. 16 rounds
        them by dither, None to nearest; 24 and 32 keep 8 and 16 further bits in the state, as
        `master_residual`. "auto" is 16. fp32 parameters ignore it; fp16 and fp64 ones take only
        None and "auto", and are rounded to nearest.
    maximize: ascend instead of descend.
    foreach: accepted as in torch.optim; all tensors of a group are always stepped together.
    capturable: accepted as in torch.optim; steps of the Triton engine can always be captured.
    differentiable: must be False.
    fused: True insists on a compiled engine, and `step` raises where there is none; a GradScaler
        then leaves its division of gradients to the step, as with torch's fused optimizers.
"""
RAISES = """
Raises:
    ValueError, TypeError: naming the argument that is not allowed.
"""


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the `locals()` that an `__init__` begins with."""
    return {name: value for name, value in arguments.items() if name not in NON_SETTING_ARGUMENTS}


def documented(cls: T, special: Mapping[str, str] | None = None) -> T:
    """Give a class's docstring an Args section with every argument, in the signature's order.

    The docstring or `special` describes what is special to the class; other descriptions come from
    the nearest base class that is `documented` and has them, or else from `COMMON`. Defaults come
    from the signature, and `RAISES` is the section of a class that has none of its own.

    Raises:
        TypeError: for an argument that nothing describes.
    """
    if sys.flags.optimize >= 2:  # Python has dropped the docstrings
        return cls
    head, own, tail = _sections(inspect.cleandoc(cls.__doc__ or ""))
    inherited = getattr(cls, "_described", None) or _sections(COMMON)[1]
    described = {**inherited, **(special or {}), **own}
    cls._described = described  # type: ignore[attr-defined]
    parameters = inspect.signature(cls).parameters
    entries = []
    for name in dict.fromkeys((*parameters, *own)):
        if name not in described:
            raise TypeError(f"{cls.__name__}: nothing describes the argument {name!r}")
        text = described[name]
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        if default is not inspect.Parameter.empty:
            text += f" Default {default!r}."
        entries.append(_entry(name, text))
    raises = "" if "Raises:\n" in tail else RAISES.strip()
    cls.__doc__ = "\n\n".join(filter(None, (head, "\n".join(("Args:", *entries)), raises, tail)))
    return cls


def constructor(
    cls: T,
    defaults: Mapping[str, Any],
    without: Collection[str],
    construct: Callable[[Callable[..., None], dict, str], None],
    special: Mapping[str, str] | None = None,
    fixed: Collection[str] = (),
) -> T:
    """Give a class a constructor with its base's arguments, each of which is described.

    Args:
        cls: the class.
        defaults: of arguments that have another default than the base's.
        without: arguments that it does not have.
        construct: is handed the base's `__init__`, the arguments that were given, by name, and the
            name of the optimizer's class, which may be derived from this one.
        special: descriptions of arguments that mean something else than the base's.
        fixed: arguments that it does not have and that may be given by name all the same. They go
            to `construct`, or from there to the base, which lets no other value pass than the one
            in `defaults` of an instance.
    """
    target: Any = cls
    # Types, not their names: tools that build objects of a configuration look those up over here.
    signature = inspect.signature(target.__base__.__init__, eval_str=True)
    parameters = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in signature.parameters.items()
        if name not in without
    ]
    signature = signature.replace(parameters=parameters)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        beside = {name: kwargs.pop(name) for name in fixed if name in kwargs}
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}") from None
        given = {**bound.arguments, **beside}
        given.pop("self")
        construct(super(target, self).__init__, given, type(self).__name__)

    __init__.__qualname__ = f"{cls.__name__}.__init__"
    __init__.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` goes by
    __init__.__annotations__ = {  # what `typing` goes by
        parameter.name: parameter.annotation for parameter in parameters[1:]
    }
    target.__init__ = __init__
    return documented(cls, special)


def _sections(doc: str) -> tuple[str, dict[str, str], str]:
    """A docstring's text before its Args, its Args by name, and the text behind them."""
    head, there, rest = doc.partition("\nArgs:\n")
    if not there:
        return doc, {}, ""
    args, _, tail = rest.partition("\n\n")
    own: dict[str, str] = {}
    for entry in re.split(r"^    (?=\S)", args, flags=re.MULTILINE)[1:]:
        name, text = entry.split(": ", 1)
        own[name] = " ".join(text.split())
    return head.rstrip(), own, tail


def _entry(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name}: {text}", WIDTH - 4, initial_indent=" " * 4, subsequent_indent=" " * 8,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
