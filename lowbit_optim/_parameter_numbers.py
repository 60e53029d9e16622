"""Numbers of an optimizer's parameters, by which `state_dict()` calls them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from lowbit_optim_kernels.reading import same_objects

Groups = Sequence[dict[str, Any]]


class Place(NamedTuple):
    """A parameter's place among those of an optimizer.

    Attributes:
        number: what `state_dict()` calls it.
        group: its group's index.
        position: in the group.
    """

    number: int
    group: int
    position: int


def all_parameters(groups: Groups) -> list[Tensor]:
    """All parameters, in the order of their numbers; `params` that are no sequence become lists.

    Raises:
        TypeError: for an iterator, which is empty the next time, a set, which has no order, one
            tensor, a dict, or what is not iterable.
    """
    for index, group in enumerate(groups):
        params = group["params"]
        if type(params) is list:  # which is known sooner than what it is none of
            continue
        if isinstance(params, (Iterator, Set, Tensor, Mapping)) or not isinstance(params, Iterable):
            raise TypeError(
                f"params of parameter group {index} must be a list; got {type(params).__name__}"
            )
        if not hasattr(params, "__getitem__"):
            group["params"] = list(params)
    return [p for group in groups for p in group["params"]]


class ParameterNumbers:
    """Places of parameters, looked up anew where users have changed the groups.

    Attributes:
        version: another one whenever parameters have new numbers. Their random bits follow from
            these, which lists that users change may shift unnoticed.
        places: of all parameters, once one was asked for.
    """

    def __init__(self) -> None:
        self.version, self._listed = 0, list[Tensor]()
        self.places: dict[Tensor, Place] = {}

    def renew(self, listed: list[Tensor], groups: Groups) -> bool:
        """Take all parameters in order, as groups list them; whether any has a new number."""
        if same_objects(listed, self._listed):
            return False
        _require_apart(groups)
        self._listed, self.version, self.places = listed, self.version + 1, {}
        return True

    def lists_others(self, listed: list[Tensor]) -> bool:
        """Whether parameters that it knows are not these."""
        return bool(self._listed) and not same_objects(listed, self._listed)

    def forget(self) -> None:
        """Let go of all parameters."""
        self._listed, self.places = [], {}

    def place_of(self, p: Tensor, groups: Groups) -> Place | None:
        """A parameter's place; None if no group has it."""
        if not _is_at(p, self.places.get(p), groups):
            self.places = {}
            listed = ((i, k, x) for i, group in enumerate(groups)
                      for k, x in enumerate(group["params"]))  # fmt: skip
            for number, (index, position, one) in enumerate(listed):
                self.places.setdefault(one, Place(number, index, position))
        return self.places.get(p)


def _require_apart(groups: Groups) -> None:
    """Refuse a parameter of two groups: both would make a state, of which one is kept."""
    of: dict[Tensor, int] = {}
    for index, group in enumerate(groups):
        for p in group["params"]:
            if of.setdefault(p, index) != index:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is in parameter groups {of[p]} and "
                    f"{index}; it can be in one only"
                )


def _is_at(p: Tensor, place: Place | None, groups: Groups) -> bool:
    if place is None or place.group >= len(groups):
        return False
    params = groups[place.group]["params"]
    if place.position >= len(params) or params[place.position] is not p:
        return False
    return place.number == place.position + sum(len(g["params"]) for g in groups[: place.group])
