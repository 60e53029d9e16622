"""An optimizer's groups, parameters and moments, read out for another library's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import _settings, _sharding, _state_dicts
from .._optimizer import LowBitOptimizer, require_own
from .._settings import EXACT, NON_SETTING_KEYS, as_number


@dataclass(frozen=True)
class Member:
    """A parameter of a group.

    Attributes:
        index: its number in the state dict.
        p: the parameter.
        settings: those that it is stepped with.
        state: its state; empty before its first step.
    """

    index: int
    p: Tensor
    settings: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def where(self) -> str:
        """What errors call its state."""
        return f"the state of {_state_dicts.place(self.index, self.p)}"

    @property
    def steps(self) -> int:
        """The number of steps taken with it."""
        return int(self.state["step"])

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
                Member(indices.setdefault(p, len(indices)), p, parts[p], optimizer.state.get(p, {}))
                for p in group["params"]
            ),
        )


def _require_inherited(number: int, part: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    own = [key for key in part if key not in ("params", *_state_dicts.STORAGE_SETTINGS)]
    for key in own:
        if part[key] is not inherited[key] and part[key] != inherited[key]:
            raise ValueError(
                f"GlobalOptimManager overrides {key!r} of parameters in parameter group {number}; "
                "put them into a group of their own, state dicts of other libraries have no "
                "settings of single parameters"
            )


def _beside(value: Any) -> Any:
    """A copy of a group's value that is no setting; `initial_lr` becomes a number, as `lr` does."""
    return _settings.plain_copy(as_number(value, wait=True) if isinstance(value, Tensor) else value)
