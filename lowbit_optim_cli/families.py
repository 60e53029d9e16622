"""Libraries and optimizers that a state dict is of, as far as it tells."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

import lowbit_optim
from lowbit_optim import LowBitOptimizer, _state_dicts
from lowbit_optim._foreign.load import LIBRARIES
from lowbit_optim._settings import COMMON_DEFAULTS

from .errors import Refused

TORCH = "torch.optim"
# What the groups of torch.optim's classes have that those of the others have not.
TELLING = {
    "SGD": {"momentum", "dampening", "nesterov"},
    "RMSprop": {"alpha", "centered"},
    "Adagrad": {"lr_decay", "initial_accumulator_value"},
}
TELLING_ADAM = {"betas", "amsgrad", "decoupled_weight_decay"}
# What schedulers, averages of weights and named parameters of torch put there, Lightning's monitor
# of learning rates looks for, and timm's schedulers read.
BESIDE = {
    "param_names", "initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr",
    "name", "lr_scale",
}  # fmt: skip
FAMILIES = sorted(
    {
        cls.family
        for cls in vars(lowbit_optim).values()
        if isinstance(cls, type) and issubclass(cls, LowBitOptimizer) and hasattr(cls, "family")
    }
)


def library(state_dict: Mapping[str, Any]) -> str:
    """The library that wrote a state dict, or one whose layout is the same.

    Of ours torch.distributed's `get_state_dict` leaves the header out, but not the settings.
    """
    groups = [group for group in state_dict["param_groups"] if isinstance(group, Mapping)]
    if _state_dicts.KEY in state_dict or any(
        COMMON_DEFAULTS.keys() <= one.keys() for one in groups
    ):
        return "lowbit_optim"
    return next((one.name for one in LIBRARIES if one.recognises(state_dict)), TORCH)


def family(state_dict: Mapping[str, Any]) -> str | None:
    """The optimizer that a state dict is of, without its bits; None if that does not tell."""
    head = state_dict.get(_state_dicts.KEY)
    if isinstance(head, Mapping):
        return str(head.get("optimizer"))
    groups = [group for group in state_dict["param_groups"] if isinstance(group, Mapping)]
    if library(state_dict) != TORCH or not groups:
        return None
    adam = "AdamW" if groups[0].get("decoupled_weight_decay") is True else "Adam"
    for name, telling in {**TELLING, adam: TELLING_ADAM}.items():
        if all(telling <= group.keys() <= _keys(name) for group in groups):
            return name
    return None


@cache
def _keys(name: str) -> set[str]:
    """What a group of torch.optim's class has; classes derived from it elsewhere have more."""
    made = getattr(torch.optim, name)([torch.zeros(1)], lr=0.0)
    return {*made.param_groups[0], *BESIDE}


def written_by(state_dict: Mapping[str, Any]) -> str:
    """The library of a state dict, for a sentence; others than torch have its layout, too."""
    of = library(state_dict)
    like_torch = of == TORCH and family(state_dict) is None
    return f"a library with {of}'s layout" if like_torch else of


def named_family(name: str) -> str:
    """The family that a user names, "AdamW" or "AdamW8bit".

    Raises:
        Refused: if there is none of this name.
    """
    known = {one.lower(): one for one in FAMILIES}
    plain = re.sub("(4|8|32)bit$", "", name.lower())
    if plain in known:
        return known[plain]
    near = [known[one] for one in difflib.get_close_matches(plain, known, n=2, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(FAMILIES)}"
    raise Refused(f"unknown optimizer {name!r}; {hint}")
