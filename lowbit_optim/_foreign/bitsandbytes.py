"""State dicts of bitsandbytes: what its tensors are, and how they are read.

A parameter's state has `state1` and, in classes of two states, `state2`: fp32, or uint8 codes with
their code books `qmap1`, `qmap2` and scales `absmax1`, `absmax2`, one a block of the flattened
tensor. AdEMAMix stacks its two averages in `state1`, and their scales in `absmax1`. Where a class
is not block-wise, by default LAMB8bit and LARS8bit until 0.49, there is one scale a tensor, `max1`
and `max2`. Since 0.49.2 all of these are in a dict of their own, `__bnb_optimizer_quant_state__`;
before that they were beside `step`.

A group says nothing of the class and has two layouts, one for classes of one state and one for
those of two; `FAMILIES` says what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.rules import Moment
from lowbit_optim_kernels.rules.adagrad import SQUARES
from lowbit_optim_kernels.rules.adam import ADAM
from lowbit_optim_kernels.rules.ademamix import ADEMAMIX
from lowbit_optim_kernels.rules.lion import MOMENTUM as LION
from lowbit_optim_kernels.rules.rmsprop import MEAN_SQUARE
from lowbit_optim_kernels.rules.sgd import MOMENTUM as SGD

from .._checks import is_number
from .._manager import own_settings
from .._settings import as_number
from .._tensor_checks import missing, require_scales, require_shape, require_values
from .coded import Coded, check_book
from .library import Library

NESTED = "__bnb_optimizer_quant_state__"
BLOCKS = (256, 2048)  # of its 8-bit optimizers, now and before 0.44
ONE_STATE = ("lr", "betas", "eps", "weight_decay")
TWO_STATES = (*ONE_STATE, "alpha", "t_alpha", "t_beta3")
# Its constructors' settings, which it never reads from a group.
NEVER_READ = (
    "optim_bits", "min_8bit_size", "percentile_clipping", "block_wise", "max_unorm", "skip_zeros",
    "is_paged",
)  # fmt: skip
TENSORS = tuple(f"{name}{i}" for i in (1, 2) for name in ("state", "qmap", "absmax", "max"))
TEMPORARY = ("new_max1", "new_max2", "unorm_vec")  # written anew in every step


@dataclass(frozen=True)
class Family:
    """The correspondence of bitsandbytes' states and groups to an optimizer of ours.

    Attributes:
        states: the moments that `state1` and `state2` hold; several in one are stacked.
        settings: those that a group of either has under the same name.
        first_beta: the setting of ours that is `betas[0]`, where `betas` is no pair of decay rates.
        always: settings that its groups do not have, with what it does in place of them.
        by_constructor: whether its constructor takes `max_unorm` and `percentile_clipping`.
        cautious: whether our class has that switch.
        whole: whether 8-bit state by default had one scale a tensor until 0.49.
    """

    states: tuple[tuple[Moment, ...], ...]
    settings: tuple[str, ...]
    first_beta: str | None = None
    always: Mapping[str, Any] = field(default_factory=dict)
    by_constructor: bool = True
    cautious: bool = True
    whole: bool = False

    @property
    def replaced(self) -> dict[str, Any]:
        """All of our settings that its groups do not have, with what they are in effect."""
        caution = {"cautious": False} if self.cautious else {}
        return {"maximize": False, **caution, **self.always}


ADAM_STATES = (ADAM[:1], ADAM[1:])
MOMENTUM_ONLY = {"dampening": 0.0, "nesterov": False}
FAMILIES: dict[str, Family] = {
    "Adam": Family(
        ADAM_STATES, ONE_STATE, always={"amsgrad": False, "decoupled_weight_decay": True}
    ),
    "AdamW": Family(ADAM_STATES, ONE_STATE, always={"amsgrad": False}),
    "LAMB": Family(
        ADAM_STATES,
        ONE_STATE,
        always={
            "amsgrad": False, "bias_correction": True, "adam_w_mode": True,
            "trust_coefficient": None,
        },
        whole=True,
    ),
    "AdEMAMix": Family((ADEMAMIX[:2], ADEMAMIX[2:]), TWO_STATES, by_constructor=False),
    "SGD": Family((SGD,), ("lr", "weight_decay"), "momentum", MOMENTUM_ONLY),
    "LARS": Family(
        (SGD,),
        ("lr", "weight_decay"),
        "momentum",
        {**MOMENTUM_ONLY, "trust_coefficient": None, "skip_wd": False, "scale_at": "grad"},
        whole=True,
    ),
    "Lion": Family((LION,), ("lr", "betas", "weight_decay")),
    "RMSprop": Family(
        ((MEAN_SQUARE,),),
        ("lr", "eps", "weight_decay"),
        "alpha",
        {"momentum": 0.0, "centered": False},
    ),
    "Adagrad": Family((SQUARES,), ("lr", "eps", "weight_decay"), always={"lr_decay": 0.0},
        cautious=False),
}  # fmt: skip


class BitsAndBytes(Library):
    """bitsandbytes' state dicts, flat and nested, of 8 and 32 bits."""

    name = "bitsandbytes"
    families = tuple(sorted(FAMILIES))

    def recognises(self, state_dict: Mapping[str, Any]) -> bool:
        """By a state's keys or, before the first step, by the settings that the groups have."""
        states = [one for one in state_dict["state"].values() if isinstance(one, Mapping) and one]
        if states:
            return any({*TENSORS, NESTED} & one.keys() for one in states)
        groups, settings = state_dict["param_groups"], own_settings()
        layouts = {frozenset(ONE_STATE), frozenset(TWO_STATES)}
        return (
            isinstance(groups, (list, tuple))
            and len(groups) > 0
            and all(isinstance(one, Mapping) and one.keys() & settings in layouts for one in groups)
        )

    def group(self, saved: Mapping[str, Any], family: str) -> dict[str, Any]:
        """Settings of its groups and fixed ones of its classes, but those that it ignores."""
        its = FAMILIES[family]
        dropped = {*TWO_STATES, *NEVER_READ} - {*its.settings}
        group = {key: value for key, value in saved.items() if key not in dropped}
        group.update(its.replaced)
        if family == "AdEMAMix":  # 0 is no warm-up to bitsandbytes
            steps = {key: as_number(saved.get(key)) for key in ("t_alpha", "t_beta3")}
            group.update({key: None if is_number(n) and n == 0 else n for key, n in steps.items()})
        if its.first_beta is not None and "betas" in saved:
            betas = saved["betas"]
            if not isinstance(betas, (tuple, list)) or not betas:
                raise ValueError(
                    f"betas must be numbers, the first of them {its.first_beta}; got {betas!r}"
                )
            group[its.first_beta] = betas[0]
        return group

    def state(
        self, saved: Mapping[str, Any], p: Tensor, family: str
    ) -> tuple[dict[str, Any], bool]:
        """Its moments under our keys, with `step` and `gnorm_vec`."""
        flat = _flat(saved)
        require_values(flat, p)
        its = FAMILIES[family]
        _check_states(flat, family, its)
        state = {key: x for key, x in flat.items() if key not in (*TENSORS, *TEMPORARY)}
        values = [_values(flat, i, moments, p) for i, moments in enumerate(its.states, 1)]
        _check_alike(values)
        exact = []
        for moments, several in zip(its.states, values, strict=True):
            for moment, value in zip(moments, several, strict=True):
                if isinstance(value, Coded):
                    own, kept = value.saved(moment)
                else:
                    own, kept = {moment.key: value}, True
                state.update(own)
                exact.append(kept)
        return state, all(exact)

    def codes(self, saved: Mapping[str, Any], p: Tensor, family: str) -> dict[str, Coded]:
        """Those of `state1` and `state2`."""
        flat, states = _flat(saved), FAMILIES[family].states
        return {
            moment.key: value
            for i, moments in enumerate(states, 1)
            for moment, value in zip(moments, _values(flat, i, moments, p), strict=True)
            if isinstance(value, Coded)
        }


BITSANDBYTES = BitsAndBytes()


def _flat(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state without the dict in the dict that 0.49.2 and newer make."""
    nested = saved.get(NESTED, {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"{NESTED!r} must be a dict, got {type(nested).__name__}")
    flat = {**saved, **nested}
    flat.pop(NESTED, None)
    return {key: value for key, value in flat.items() if value is not None}


def _check_states(flat: Mapping[str, Any], family: str, its: Family) -> None:
    """Refuse the state of a class with more or fewer states than this one's."""
    wanted = [f"state{i}" for i in range(1, len(its.states) + 1)]
    there = [key for key in ("state1", "state2") if key in flat]
    if there != wanted:
        means = "; ".join(
            f"{key}: {' and '.join(m.key for m in moments)}"
            for key, moments in zip(wanted, its.states, strict=True)
        )
        raise ValueError(
            f"{' and '.join(wanted)} ({means}) are what {family} needs; there is "
            f"{' and '.join(there) or 'neither'}"
        )
    if "step" not in flat:
        raise missing("step", flat)


def _values(
    flat: Mapping[str, Any], i: int, moments: tuple[Moment, ...], p: Tensor
) -> list[Coded | Tensor]:
    """The tensors of each moment that `state1` or `state2` holds: codes, or numbers."""
    key, state = f"state{i}", flat[f"state{i}"]
    stacked = len(moments) > 1
    wanted = (len(moments), *p.shape) if stacked else tuple(p.shape)
    require_shape(repr(key), state, wanted, f"{wanted} is needed")
    if not state.is_contiguous():
        # Its kernels for GPUs go through memory in storage order, its CPU code does not.
        raise ValueError(f"{key!r} is not contiguous, which does not tell its elements' order")
    pieces = list(state.detach().unbind(0)) if stacked else [state.detach()]
    if state.is_floating_point():
        return list(pieces)
    if state.dtype != torch.uint8:
        raise ValueError(f"{key!r} must hold uint8 codes or floating numbers; got {state.dtype}")
    book = _required(flat, f"qmap{i}")
    check_book(f"qmap{i}", book, 256)
    scales, block = _scales(flat, i, len(moments), p.numel())
    return [Coded(key, codes, own, book, block) for codes, own in zip(pieces, scales, strict=True)]


def _check_alike(values: Sequence[Sequence[Coded | Tensor]]) -> None:
    """Refuse states of different widths or blocks; scales that are cut off can look like those."""
    blocks = [x.block if isinstance(x, Coded) else None for (x, *_) in values]
    if len(set(blocks)) > 1:
        one, other = ("fp32" if n is None else f"codes in blocks of {n} elements" for n in blocks)
        raise ValueError(
            f"'state1' is {one} and 'state2' {other}, going by the scales; both must be alike"
        )


def _required(flat: Mapping[str, Any], key: str) -> Any:
    if key not in flat:
        raise missing(key, flat)
    return flat[key]


def _scales(flat: Mapping[str, Any], i: int, count: int, numel: int) -> tuple[list[Tensor], int]:
    """Each moment's scales, and how many elements share one."""
    if f"absmax{i}" not in flat and f"max{i}" in flat:
        key, blocks = f"max{i}", {max(numel, 1): 1}
    else:
        key, blocks = f"absmax{i}", {block: -(-numel // block) for block in BLOCKS}
    scales = _required(flat, key)
    require_scales(key, scales)
    for block, length in blocks.items():
        if tuple(scales.shape) == ((count, length) if count > 1 else (length,)):
            # Of a tensor without elements `max` has a scale all the same, which is no block's.
            own = scales.detach().reshape(count, length)[:, : -(-numel // block)]
            return list(own.unbind(0)), block
    of = "one a tensor" if key.startswith("max") else f"one a block of {BLOCKS[0]} or {BLOCKS[1]}"
    allowed = " or ".join(str((count, n) if count > 1 else (n,)) for n in blocks.values())
    raise ValueError(f"{key!r} has shape {tuple(scales.shape)}; {of} elements is {allowed}")
