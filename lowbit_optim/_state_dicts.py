"""Whole state dicts: the header, parameter groups and entries of `state`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from . import _manager
from ._saved_state import saved_step
from ._settings import plain, plain_copy

KEY = "lowbit_optim"
FORMAT_VERSION = 2

# Settings of the optimizer at hand, not of the file.
STORAGE_SETTINGS = ("optim_bits", "state_format", "min_8bit_size", "master_weight_bits")


def add_header(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """A hook, and the first one, so that a user's hooks are given all that is saved."""
    state_dict[KEY] = {"format_version": FORMAT_VERSION, "optimizer": optimizer.family}
    state_dict["param_groups"] = plain(state_dict["param_groups"])
    state_dict["state"] = {i: _with_saved_step(i, x) for i, x in state_dict["state"].items()}


def _with_saved_step(index: Any, one: Any) -> Any:
    """A parameter's state with `step` as torch's optimizers save it, whatever else it is.

    In memory it is an integer, because fp32 stops counting at 2**24.
    """
    is_state = isinstance(index, int) and isinstance(one, Mapping)
    counts = is_state and isinstance(one.get("step"), Tensor)
    return {**one, "step": saved_step(one["step"])} if counts else one


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Say of what is refused inside where it is; a ValueError whatever it was."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def after_hooks(optimizer: Any, state_dict: Any) -> Any:
    """A state dict as the hooks that run before it is loaded leave it."""
    if isinstance(state_dict, Mapping):
        state_dict = dict(state_dict)  # a hook may change its keys
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = pre_hook(optimizer, state_dict)
        state_dict = state_dict if result is None else result
    return state_dict


def check_header(state_dict: Any, family: str, known: Collection[str]) -> None:
    """Refuse what is no state dict, one of a newer format or of another optimizer.

    Args:
        state_dict: what is to be loaded.
        family: the optimizer's.
        known: what its parameter groups hold; a user may have put more there than it reads.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"state_dict has no {key!r}; it is not an optimizer's state dict")
    if not isinstance(state_dict["state"], Mapping):
        raise ValueError(f"state_dict['state'] must be a dict, got {_named(state_dict['state'])}")
    check_groups(state_dict["param_groups"])
    head = state_dict.get(KEY)
    if head is None:
        _check_without_header(state_dict, family, known)
        return
    if not isinstance(head, Mapping) or not {"format_version", "optimizer"} <= head.keys():
        raise ValueError(
            f"state_dict[{KEY!r}] must be a dict with format_version and optimizer; got {head!r}"
        )
    version = head["format_version"]
    if type(version) is not int or version < 1:
        raise ValueError(f"state_dict has format_version {version!r}; it must be an integer >= 1")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"state_dict has format_version {version}, newer than the "
            f"{FORMAT_VERSION} that this lowbit_optim reads; update lowbit_optim"
        )
    if head["optimizer"] != family:
        raise ValueError(
            f"state_dict is of the optimizer {head['optimizer']!r} and cannot be loaded into "
            f"{family!r}"
        )


def _check_without_header(
    state_dict: Mapping[str, Any], family: str, known: Collection[str]
) -> None:
    """Refuse what is neither torch.optim's nor ours, rebuilt by a checkpoint library.

    That is settings of another optimizer, or a momentum that contains the learning rate, as that of
    timm's RMSpropTF does.
    """
    keys = {key for group in state_dict["param_groups"] for key in group}
    foreign = (keys & _manager.own_settings()).difference(known)
    if foreign:
        raise ValueError(
            f"state_dict is of another optimizer than {family!r}, which has no "
            f"{', '.join(sorted(foreign))}"
        )
    for group in state_dict["param_groups"]:
        params = group["params"] if group.get("lr_in_momentum") else ()
        states = map(state_dict["state"].get, params)
        if any(isinstance(one, Mapping) and "momentum_buffer" in one for one in states):
            raise ValueError(
                "state_dict has lr_in_momentum=True, as of timm's RMSpropTF: its momentum_buffer "
                "contains the learning rate, which here it does not; delete momentum_buffer from "
                "the states to begin with a new one"
            )


def _named(value: Any) -> str:
    """A value that should have been something else, in a few words."""
    return "None" if value is None else f"a {type(value).__name__}"


def check_groups(groups: Any) -> None:
    """Refuse parameter groups that are not a list of dicts, each with a list of parameters.

    Those are indices or names; or tensors, where the optimizer's own groups and state were saved.
    """
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"state_dict['param_groups'] must be a list, got {_named(groups)}")
    for i, group in enumerate(groups):
        where = f"parameter group {i} of state_dict"
        if not isinstance(group, Mapping):
            raise ValueError(f"{where} must be a dict, got {_named(group)}")
        params = group.get("params")
        if not isinstance(params, (list, tuple)):
            raise ValueError(f"{where} must have a list 'params', got {_named(params)}")
        for index in params:
            if not isinstance(index, (int, str, Tensor)):
                raise ValueError(
                    f"{where} must list parameters by index or name, got {_named(index)}"
                )


def merged_groups(optimizer: Any, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Saved groups with the current parameters, storage settings and any setting they lack.

    What else a group has is the file's alone, as in torch: an `initial_lr` that stayed would be the
    base of schedulers made later. A run of an earlier version goes on as it was, without dither.
    How another optimizer takes its steps is not how this one does; and torch's AdamW, too, decays
    as such when it goes on from Adam's.
    """
    groups, name = optimizer.param_groups, type(optimizer).__name__
    saved = state_dict["param_groups"]
    head = state_dict.get(KEY)
    unread = {"params"}
    if head is None:
        unread |= {"foreach", "fused", *optimizer.FIXED} - {optimizer.MODE}
    lacking = {"dither": False} if head is not None and head["format_version"] == 1 else {}
    if len(saved) != len(groups):
        raise ValueError(
            f"state_dict has {len(saved)} parameter groups, this {name} has {len(groups)}"
        )
    merged = []
    for i, (group, old) in enumerate(zip(groups, saved, strict=True)):
        if len(old["params"]) != len(group["params"]):
            raise ValueError(
                f"parameter group {i} of state_dict has {len(old['params'])} parameters, "
                f"that of this {name} has {len(group['params'])}"
            )
        kept = {key: group[key] for key in ("params", *STORAGE_SETTINGS) if key in group}
        names = (*optimizer.defaults, *optimizer.FIXED, "param_names")
        own = {key: group[key] for key in names if key in group}
        settings = {key: plain_copy(value) for key, value in old.items() if key not in unread}
        merged.append({**own, **lacking, **settings, **kept})
    return merged


def place(index: Any, p: Tensor) -> str:
    """What errors call a parameter, by what its group in a state dict lists it as."""
    number = "" if isinstance(index, Tensor) else f" {index!r}"
    return f"parameter{number} of shape {tuple(p.shape)}"


class SavedState(NamedTuple):
    """The state that a state dict has of a parameter.

    Attributes:
        where: what errors call the parameter.
        p: itself.
        group: its group, as it will be.
        saved_group: its group in the state dict.
        state: what was saved.
        ours: whether this package saved it, which gives every state a `step`.
    """

    where: str
    p: Tensor
    group: Mapping[str, Any]
    saved_group: Mapping[str, Any]
    state: dict[str, Any]
    ours: bool


def saved_states(
    groups: Iterable[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[SavedState]:
    """The states of a state dict's parameters that have any."""
    states = dict(state_dict["state"])
    named: dict[Any, Tensor] = {}
    for group, old in zip(groups, state_dict["param_groups"], strict=True):
        for p, index in zip(group["params"], old["params"], strict=True):
            where = place(index, p)
            if named.setdefault(index, p) is not p:
                raise ValueError(f"state_dict's parameter groups list {where} for another one, too")
            saved = states.pop(index, None)
            if saved is not None and not isinstance(saved, Mapping):
                raise ValueError(f"the state of {where} must be a dict, got {_named(saved)}")
            if saved:
                there = {key: x for key, x in saved.items() if x is not None}
                yield SavedState(where, p, group, old, there, KEY in state_dict)
    for key, value in states.items():
        # By a word of its own an optimizer around this one keeps what is of no parameter.
        if isinstance(value, Mapping) and not (isinstance(key, str) and key.isidentifier()):
            number = isinstance(key, str) and key.isdecimal() and int(key) in named
            hint = "; numbers of parameters must be integers, not strings" if number else ""
            entry = "of a tensor" if isinstance(key, Tensor) else repr(key)
            raise ValueError(
                f"state_dict['state'] has an entry {entry}, which no parameter group lists{hint}"
            )


def other_entries(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Entries of `state` of no parameter, which a user has put there and torch carries along."""
    listed = {index for group in state_dict["param_groups"] for index in group["params"]}
    entries = state_dict["state"].items()
    return {key: plain_copy(value) for key, value in entries if key not in listed}
