"""An optimizer's groups, parameters and moments, read out for another library's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit_optim_kernels.formats import FORMATS, Format
from lowbit_optim_kernels.rules.adagrad import SQUARES
from lowbit_optim_kernels.rules.adam import ADAM, AMSGRAD
from lowbit_optim_kernels.rules.ademamix import ADEMAMIX
from lowbit_optim_kernels.rules.rmsprop import MEAN, MEAN_SQUARE, VARIANCE
from lowbit_optim_kernels.rules.sgd import MOMENTUM
from lowbit_optim_kernels.rules.shared import NORMS
from lowbit_optim_kernels.weights import RESIDUAL_KEY

from .. import _saved_moments, _saved_state, _settings, _sharding, _state_dicts
from .._optimizer import LowBitOptimizer, require_own
from .._settings import EXACT, NON_SETTING_KEYS, as_number

# Of the optimizers that other libraries have, with whatever settings.
MOMENTS = (*AMSGRAD, *ADEMAMIX, *MOMENTUM, *SQUARES, MEAN_SQUARE, MEAN, VARIANCE)


@dataclass(frozen=True)
class Member:
    """A parameter of a group.

    Attributes:
        index: its number in the state dict.
        p: the parameter.
        settings: those that it is stepped with.
        state: all that is kept of it.
        begun: whether that is more than what a user keeps of it before its first step.
    """

    index: int
    p: Tensor
    settings: Mapping[str, Any]
    state: Mapping[str, Any]
    begun: bool

    @property
    def where(self) -> str:
        """What errors call its state."""
        return f"the state of {_state_dicts.place(self.index, self.p)}"

    @property
    def steps(self) -> int:
        """The number of steps taken with it; 0 where its state says none, as a step takes it."""
        return int(self.state.get("step", 0))

    @property
    def added(self) -> dict[str, Any]:
        """A copy of what a user has put into its state."""
        own = _own_keys(tuple(FORMATS.values()))
        return {key: _settings.plain_copy(x) for key, x in self.state.items() if key not in own}

    def numbers(self, optimizer: LowBitOptimizer) -> dict[str, Tensor]:
        """Its moments in 32 bits by key, those that torch.optim keeps with these settings."""
        settings = {**self.settings, **EXACT}
        with _state_dicts.refusing(self.where):
            state = optimizer._state_for_settings(dict(self.state), self.p, settings)
        return {moment.key: state[moment.key] for moment in optimizer._moments(settings)}


@dataclass(frozen=True)
class Group:
    """A parameter group.

    Attributes:
        name: what errors call it.
        settings: all of them, as numbers.
        added: what a scheduler or a user has put into the group beside them.
        members: its parameters.
    """

    name: str
    settings: Mapping[str, Any]
    added: Mapping[str, Any]
    members: tuple[Member, ...]

    def packed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The group as a state dict has it, with these settings."""
        return {**settings, **self.added, "params": [member.index for member in self.members]}

    def require(self, values: Mapping[str, Any], library: str) -> None:
        """Raise a ValueError for a setting that is not what the library does in any case."""
        for key, value in values.items():
            if self.settings.get(key, value) != value:
                raise ValueError(
                    f"{self.name} has {key}={self.settings[key]!r}, and {library} has only "
                    f"{value!r} for it"
                )


@cache
def _own_keys(formats: tuple[Format, ...]) -> frozenset[str]:
    """The keys that optimizers keep in a parameter's state, or have kept with other settings."""
    several = (ADAM, *((moment,) for moment in MOMENTS))
    kept = (_saved_moments.keys_of(m, f) for m in several for f in formats if f.refusal(m) is None)
    return frozenset({"step", RESIDUAL_KEY, NORMS.key}.union(*kept))


def require_optimizer(optimizer: Any, function: str, library: str, families: Sequence[str]) -> None:
    """Raise for what is no optimizer of this package, or none that the library has."""
    require_own(optimizer, function)
    if optimizer.family not in families:
        allowed = ", ".join(families)
        raise ValueError(f"{library} has no {optimizer.family}; {function} takes {allowed}")


def groups_of(optimizer: LowBitOptimizer) -> Iterator[Group]:
    """Every group with its parameters, each of which has one number.

    Raises:
        ValueError: if settings of single parameters are overridden, which no group can say, or for
            a DTensor, of which other libraries know no shards.
    """
    optimizer._follow_settings()
    indices: dict[Tensor, int] = {}
    known = {*optimizer.defaults, *optimizer.FIXED, *NON_SETTING_KEYS}
    for number, group in enumerate(optimizer.param_groups):
        inherited = optimizer._settings_of(number)
        parts = {}
        if any(map(_sharding.is_dtensor, group["params"])):
            raise ValueError(
                f"parameter group {number} has DTensors; load a full state dict "
                "(get_optimizer_state_dict with full_state_dict=True) into an optimizer of whole "
                "parameters and write that"
            )
        for _, part in optimizer._parts(number):
            _require_inherited(number, part, inherited)
            parts.update(dict.fromkeys(part["params"], part))
        yield Group(
            name=f"parameter group {number}",
            settings={
                key: as_number(x, wait=True) for key, x in inherited.items() if key != "params"
            },
            added={key: _beside(x) for key, x in group.items() if key not in known},
            members=tuple(
                _member(optimizer, indices.setdefault(p, len(indices)), p, parts[p])
                for p in group["params"]
            ),
        )


def _member(
    optimizer: LowBitOptimizer, index: int, p: Tensor, settings: Mapping[str, Any]
) -> Member:
    state = optimizer.state.get(p, {})
    begun = _saved_state.has_begun(state, optimizer._moments(settings))
    return Member(index, p, settings, state, begun)


def _require_inherited(number: int, part: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    own = [key for key in part if key not in ("params", *_state_dicts.STORAGE_SETTINGS)]
    for key in own:
        if part[key] is not inherited[key] and part[key] != inherited[key]:
            raise ValueError(
                f"GlobalOptimManager overrides {key!r} of parameters in parameter group {number}; "
                "put them into a group of their own, state dicts of other libraries have no "
                "settings of single parameters"
            )


def on_device(state: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """A parameter's moments on a device, or where they are."""
    if device is None:
        return dict(state)
    return {key: x.to(device) if isinstance(x, Tensor) else x for key, x in state.items()}


def entries_beside(optimizer: LowBitOptimizer) -> dict[Any, Any]:
    """A copy of the entries of `state` that are of no parameter."""
    entries = optimizer.state.items()
    return {key: _settings.plain_copy(x) for key, x in entries if not isinstance(key, Tensor)}


def _beside(value: Any) -> Any:
    """A copy of a group's value that is no setting; `initial_lr` becomes a number, as `lr` does."""
    return _settings.plain_copy(as_number(value, wait=True) if isinstance(value, Tensor) else value)
