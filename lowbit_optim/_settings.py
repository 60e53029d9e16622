"""Settings of parameter groups as numbers: NumPy scalars and tensors are welcome, stored as given.

A group holds what its user put there, so that a scheduler or a user who keeps a tensor in hand goes
on seeing it. A step, the checks and the rules see `resolved` settings: Python's numbers, but for
tensors on an accelerator, which are not read back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence, Set
from numbers import Integral, Real
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit_optim_kernels.formats import FORMATS

from . import _checks

Validate = Callable[[Mapping[str, Any]], None]

# What a group has beside settings: its parameters, and the norm of all gradients in the last step.
PREVIOUS_NORM = "previous_gradient_norm"
NON_SETTING_KEYS = ("params", PREVIOUS_NORM)
_UNREAD = (*NON_SETTING_KEYS, "param_names")  # by a step
# Settings that every group has, whether or not the class has arguments for them.
COMMON_DEFAULTS = {"state_format": None, "dither": True, "seed": 0, "master_weight_bits": "auto"}
WIDTH_AND_FORMAT = ("optim_bits", "state_format")
EXACT = {"optim_bits": 32, "state_format": None}
_PLAIN_TYPES = (float, int, bool, str, type(None))


def plain(value: Any) -> Any:
    """A tree of Python's own numbers and lists, as `torch.load(weights_only=True)` reads them.

    Others are NumPy's numbers, fractions, named tuples and what configurations have: the lists of
    OmegaConf and Hydra, the numbers, strings and lists of classes of their own by which YAML is
    written back as it was.
    """
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        own = list if isinstance(value, list) else tuple
        items = own(map(plain, value))
        return value if type(value) is own and all(map(is_, items, value)) else items
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return list(map(plain, value))
    return value


def plain_copy(value: Any, device: torch.device | None = None) -> Any:
    """A tree with tensors of its own, perhaps on another device, and `plain` else."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: plain_copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        own = list if isinstance(value, list) else tuple
        return own(plain_copy(item, device) for item in value)
    return plain(value)


def as_number(value: Any, wait: bool = False) -> Any:
    """A setting's `plain` value without tensors of one element.

    Those on an accelerator stay, as 0-d ones, unless it is to `wait` for them.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return value
        return value.item() if wait or value.device.type == "cpu" else value.reshape(())
    value = plain(value)
    if isinstance(value, (list, tuple)):
        return tuple(as_number(item, wait) for item in value)
    return value


class Resolved(dict[str, Any]):
    """A group's settings as numbers.

    Attributes:
        worked_out: what a step has made of them that depends neither on lr nor on `params`, for all
            that differ in these.
    """

    def __init__(self, settings: Any, worked_out: dict[str, Any] | None = None) -> None:
        super().__init__(settings)
        self.worked_out: dict[str, Any] = {} if worked_out is None else worked_out

    def having(self, key: str, value: Any) -> Resolved:
        """These settings with another lr or other `params`."""
        return Resolved({**self, key: value}, self.worked_out)


def resolved(group: Mapping[str, Any]) -> Resolved:
    """A group's settings as numbers; parameters and their names are left as they are."""
    return Resolved(
        (key, value if key in _UNREAD or type(value) in _PLAIN_TYPES else as_number(value))
        for key, value in group.items()
    )


def with_storage(own: Mapping[str, Any], inherited: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a group, of an override or of a constructor, with what they mean for storage.

    Args:
        own: the settings; an own `state_format` decides `optim_bits`, and with own `optim_bits` an
            inherited format of other bits does not count.
        inherited: the settings that apply where there are no own.

    Raises:
        ValueError: if own `optim_bits` and an own `state_format` contradict each other.
    """
    if "optim_bits" in own:
        _checks.optim_bits(own["optim_bits"])
    name = own.get("state_format")
    if name is not None:
        _checks.state_format(name)
        agreed = {**own, "optim_bits": own.get("optim_bits", FORMATS[name].bits)}
        _checks.storage(agreed)
        return agreed
    name = inherited.get("state_format")
    others = name is not None and "optim_bits" in own and own["optim_bits"] != FORMATS[name].bits
    return {**own, "state_format": None} if others else dict(own)


def _may_change(value: Any) -> bool:
    """Whether a value can become another one while it stays the same object."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, (Tensor, MutableSequence, dict, np.ndarray))


def _require(index: int, group: Mapping[str, Any], needed: Set[str]) -> None:
    """Refuse a group without these settings, as one that was put into the list by hand."""
    lacking = needed - group.keys()
    if lacking:
        raise ValueError(
            f"parameter group {index} must have every setting of the optimizer, and lacks "
            f"{', '.join(map(repr, sorted(lacking)))}; add_param_group gives a group those that it "
            "has not"
        )


def _storage(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that say which format its moments are in."""
    _require(index, group, {*WIDTH_AND_FORMAT})
    stored = {key: as_number(group[key]) for key in WIDTH_AND_FORMAT}
    _checks.optim_bits(stored["optim_bits"])
    return stored


class Settings:
    """The resolved and checked settings of each group, kept while nothing in the group is new.

    Args:
        constants: settings of one value in all groups. Those that lack them are given them: a
            wrapper that makes groups of an optimizer's `defaults` does not find them there.
    """

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self._constants = constants
        self._kept: dict[int, tuple[dict[str, Any], Resolved]] = {}  # as given, and as resolved
        self._stored_as: dict[int, dict[str, Any]] = {}

    def keep_first(self, count: int) -> None:
        """Forget groups that are no longer there, and with them their parameters."""
        for known in (self._kept, self._stored_as):
            for index in [index for index in known if index >= count]:
                del known[index]

    def forget(self) -> None:
        """Let go of all parameters."""
        self._kept = {}

    def remember(self, index: int, group: Mapping[str, Any]) -> None:
        """Take a group's `optim_bits` and `state_format` as what later changes start from."""
        self._stored_as[index] = _storage(index, group)

    def settle(self, index: int, group: dict[str, Any]) -> None:
        """Of a group's `optim_bits` and `state_format`, let what has been changed decide.

        Raises:
            ValueError: if both have been changed and do not agree, or one is missing; the group
                stays as it is.
        """
        now, before = _storage(index, group), self._stored_as.get(index, {})
        if now == before:
            return
        changed = {key: value for key, value in now.items() if value != before.get(key, self)}
        agreed = {**now, **with_storage(changed, before)}
        _checks.storage(agreed)
        group.update({key: value for key, value in agreed.items() if value != now[key]})
        self._stored_as[index] = agreed

    def resolved_for(
        self, index: int, group: dict[str, Any], needed: Set[str], validate: Validate
    ) -> Resolved:
        """The settings of the group at this index.

        Raises:
            ValueError: if the group lacks a setting that is needed.
            ValueError, TypeError: as `validate` does, for settings that a step cannot run with.
        """
        given, before = self._kept.get(index, ({}, None))
        if before is not None and given.keys() == group.keys():
            new = [key for key, value in group.items() if value is not given[key]]
            if not new:
                return before
            if new == ["lr"] and type(group["lr"]) is float:  # as schedulers do in every step
                _checks.learning_rate(group["lr"])
                given["lr"], after = group["lr"], before.having("lr", group["lr"])
                self._kept[index] = given, after
                return after
        for key, value in self._constants.items():
            group.setdefault(key, value)
        _require(index, group, needed)
        self.settle(index, group)
        known = resolved(group)
        validate(known)
        self._kept.pop(index, None)
        values = (value for key, value in group.items() if key not in _UNREAD)
        if not any(map(_may_change, values)):
            self._kept[index] = dict(group), known
        return known
