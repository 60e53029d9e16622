"""`as_ours`: a state dict of another library as one of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _checks, _state_dicts
from .._state_base import StateBase
from .bitsandbytes import BITSANDBYTES
from .coded import Coded
from .library import Library
from .torchao import TORCHAO

LIBRARIES: tuple[Library, ...] = (BITSANDBYTES, TORCHAO)


@torch.no_grad()
def as_ours(optimizer: StateBase, state_dict: Any) -> Any:
    """A state dict of another library as one of ours, with a warning; any other as it is.

    Args:
        optimizer: what is going to load it; not changed.
        state_dict: whatever `load_state_dict` was given; not changed.

    Raises:
        ValueError: if it is of another library and does not fit the optimizer.
    """
    library = _library_of(state_dict)
    if library is None:
        return state_dict
    name, family = type(optimizer).__name__, optimizer.family
    where = f"{name} cannot load this state_dict of {library.name}"
    with _state_dicts.refusing(where):
        if family not in library.families:
            raise ValueError(f"it has no {family}, only {', '.join(library.families)}")
        _state_dicts.check_groups(state_dict["param_groups"])
        groups = [library.group(group, family) for group in state_dict["param_groups"]]
    converted = {**state_dict, "param_groups": groups, "state": dict(state_dict["state"])}
    exact: dict[Any, bool] = {}
    merged = _state_dicts.merged_groups(optimizer, converted)
    for group, old in zip(merged, groups, strict=True):
        for p, index in zip(group["params"], old["params"], strict=True):
            saved = state_dict["state"].get(index)
            if not isinstance(saved, Mapping) or not saved:
                continue
            with _state_dicts.refusing(f"{where}: {_state_dicts.place(index, p)}"):
                converted["state"][index], exact[index] = library.state(saved, p, family)
    said = f"{name} converts a state_dict of {library.name}: {_kept(list(exact.values()))}"
    _checks.warn_user(said, "torch")  # whose hooks are between this line and the caller's
    return converted


def codes_of(optimizer: StateBase, state_dict: Any) -> dict[int, dict[str, Coded]]:
    """Moments that are in another library's codes in a state dict that an optimizer has loaded.

    Returns:
        Those of each parameter by key, under its number in what the optimizer saves.
    """
    library, found = _library_of(state_dict), {}
    if library is None:
        return {}
    numbers: dict[Tensor, int] = {}
    for group, old in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], old["params"], strict=True):
            number = numbers.setdefault(p, len(numbers))
            if saved := state_dict["state"].get(index):
                found[number] = library.codes(saved, p, optimizer.family)
    return found


def _library_of(state_dict: Any) -> Library | None:
    """The library that a state dict is of, if it is one of those that are known here."""
    if not isinstance(state_dict, Mapping) or _state_dicts.KEY in state_dict:
        return None
    if not isinstance(state_dict.get("state"), Mapping) or "param_groups" not in state_dict:
        return None
    return next((one for one in LIBRARIES if one.recognises(state_dict)), None)


def _kept(exact: Sequence[bool]) -> str:
    """The share of the moments that is read bit for bit, in words; it may be rounded after that."""
    if not exact:
        return "it has no moments yet"
    if all(exact):
        return "its moments are read bit for bit"
    return (
        f"the moments of {sum(exact)} of {len(exact)} parameters are read bit for bit, the others "
        "as numbers, since their blocks or codes differ"
    )
